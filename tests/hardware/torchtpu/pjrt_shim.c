// A PJRT plugin that is XLA's plugin for the host's processor, for programs that take it for a TPU's.
//
// TorchTPU creates its client with an option that only a TPU's plugin knows, and the processor's
// refuses what it does not know. This one leaves that option out, asks for one device instead, and
// changes nothing else. The environment's PJRT_CPU_PLUGIN is the path of the real plugin. To the file
// PJRT_EXECUTIONS, if it is set, a byte is appended for each program that is executed.
//
//   cc -shared -fPIC -O1 -o pjrt_shim.so pjrt_shim.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of XLA's xla/pjrt/c/pjrt_c_api.h, version 0.115, what is needed here. Structures only ever grow
// at their ends, and each says how long it is.
typedef struct {
  size_t struct_size;
  void *extension;
  const char *name;
  size_t name_size;
  int type;  // 1: a 64-bit integer
  union {
    const char *text;
    int64_t integer;
  } value;
  size_t value_size;
} NamedValue;

typedef struct {
  size_t struct_size;
  void *extension;
  const NamedValue *options;
  size_t option_count;
  // Callbacks follow, and the created client.
} CreateClientArgs;

typedef struct {
  size_t struct_size;
  void *extension;
  struct {
    size_t struct_size;
    void *extension;
    int major, minor;
  } version;
  void *functions_before[10];
  void *(*create_client)(CreateClientArgs *);
  void *functions_between[44];
  void *(*execute)(void *);
  // More functions follow.
} Api;

static const char LEFT_OUT[] = "premapped_buffer_size";
static const char DEVICE_COUNT[] = "cpu_device_count";
static void *(*create_client)(CreateClientArgs *);

static void *create_cpu_client(CreateClientArgs *args) {
  NamedValue *options = calloc(args->option_count + 1, sizeof *options);
  size_t count = 0;
  for (size_t i = 0; i < args->option_count; i++) {
    const NamedValue *option = &args->options[i];
    if (option->name_size == strlen(LEFT_OUT) &&
        memcmp(option->name, LEFT_OUT, option->name_size) == 0)
      continue;
    options[count++] = *option;
  }
  NamedValue *devices = &options[count++];
  *devices = (NamedValue){.struct_size = sizeof *devices, .name = DEVICE_COUNT,
                          .name_size = strlen(DEVICE_COUNT), .type = 1, .value_size = 1};
  devices->value.integer = 1;
  args->options = options;
  args->option_count = count;
  void *error = create_client(args);
  free(options);
  return error;
}

static void *(*execute)(void *);
static FILE *executions;

static void *execute_and_count(void *args) {
  fputc('.', executions);
  fflush(executions);
  return execute(args);
}

const Api *GetPjrtApi(void) {
  static Api *changed;
  if (changed) return changed;
  const char *path = getenv("PJRT_CPU_PLUGIN");
  void *plugin = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  const Api *(*get_api)(void) = plugin ? (const Api *(*)(void))dlsym(plugin, "GetPjrtApi") : NULL;
  if (!get_api) {
    fprintf(stderr, "pjrt_shim: no plugin at PJRT_CPU_PLUGIN: %s\n", path ? dlerror() : "not set");
    return NULL;
  }
  const Api *api = get_api();
  changed = memcpy(malloc(api->struct_size), api, api->struct_size);
  create_client = api->create_client;
  changed->create_client = create_cpu_client;
  const char *counted = getenv("PJRT_EXECUTIONS");
  if (counted && (executions = fopen(counted, "a"))) {
    execute = api->execute;
    changed->execute = execute_and_count;
  }
  return changed;
}
