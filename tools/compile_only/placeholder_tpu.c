// A PJRT plugin for a TPU slice that is not there: libtpu compiles, nothing is computed.
//
// A program that takes it for libtpu sees one device of its own in the slice PLACEHOLDER_TOPOLOGY
// ("v6e:4x4"). Each program is compiled by libtpu (PLACEHOLDER_LIBTPU) for that slice. Buffers have
// a shape and no memory: what is read back is zero. In the folder PLACEHOLDER_FOLDER, the file
// "log" has a line for each event, and N/ the dump of XLA for the N-th compiled program. Lines:
//
//   compiled N NANOSECONDS ARGUMENT_BYTES OUTPUT_BYTES ALIASED_BYTES TEMPORARY_BYTES PEAK_BYTES
//   executed N ARGUMENTS... -> KEPT... -> RESULTS...
//                                           numbers of buffers; kept: places of arguments whose
//                                           memory no result may take
//   buffer NUMBER BYTES                     it is on the device from here on
//   freed NUMBER
//
//   cc -shared -fPIC -O1 -o placeholder_tpu.so placeholder_tpu.c -ldl -lpthread
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

// -- of XLA's xla/pjrt/c/pjrt_c_api.h, what is needed here (structures only grow at their ends) -

#define ARGS(...) struct { size_t struct_size; void *extension; __VA_ARGS__; }
typedef void *Function(void *);

// The places of functions in the interface, which start after its sizes and its version.
enum {
  ERROR_DESTROY, ERROR_MESSAGE, ERROR_CODE, PLUGIN_INITIALIZE, PLUGIN_ATTRIBUTES,
  EVENT_DESTROY, EVENT_IS_READY, EVENT_ERROR, EVENT_AWAIT, EVENT_ON_READY,
  CLIENT_CREATE, CLIENT_DESTROY, CLIENT_PLATFORM_NAME, CLIENT_PROCESS_INDEX,
  CLIENT_PLATFORM_VERSION, CLIENT_DEVICES, CLIENT_ADDRESSABLE_DEVICES, CLIENT_LOOKUP_DEVICE,
  CLIENT_LOOKUP_ADDRESSABLE_DEVICE, CLIENT_ADDRESSABLE_MEMORIES, CLIENT_COMPILE,
  CLIENT_DEFAULT_DEVICE_ASSIGNMENT, CLIENT_BUFFER_FROM_HOST,
  DESCRIPTION_ID, DESCRIPTION_PROCESS_INDEX, DESCRIPTION_ATTRIBUTES, DESCRIPTION_TO_STRING = 28,
  DEVICE_DESCRIPTION, DEVICE_IS_ADDRESSABLE, DEVICE_LOCAL_HARDWARE_ID, DEVICE_MEMORIES,
  DEVICE_DEFAULT_MEMORY, DEVICE_MEMORY_STATS,
  MEMORY_ID, MEMORY_KIND, MEMORY_DEBUG_STRING, MEMORY_TO_STRING, MEMORY_DEVICES,
  EXECUTABLE_DESTROY, EXECUTABLE_SERIALIZE = 49,
  LOADED_DESTROY, LOADED_EXECUTABLE, LOADED_DEVICES, LOADED_DELETE, LOADED_IS_DELETED,
  LOADED_EXECUTE, EXECUTABLE_DESERIALIZE, LOADED_FINGERPRINT,
  BUFFER_DESTROY, BUFFER_TYPE, BUFFER_DIMENSIONS, BUFFER_UNPADDED_DIMENSIONS,
  BUFFER_DYNAMIC_DIMENSIONS, BUFFER_LAYOUT, BUFFER_SIZE, BUFFER_DEVICE, BUFFER_MEMORY,
  BUFFER_DELETE, BUFFER_IS_DELETED, BUFFER_COPY_TO_DEVICE, BUFFER_TO_HOST, BUFFER_IS_ON_CPU,
  BUFFER_READY_EVENT, BUFFER_POINTER, BUFFER_MORE_REFERENCES, BUFFER_LESS_REFERENCES,
  BUFFER_DATA_POINTER,
  TOPOLOGY_CREATE = 82, TOPOLOGY_DESCRIPTIONS = 86, COMPILE = 89, EXECUTABLE_OUTPUT_TYPES,
  EXECUTABLE_OUTPUT_DIMENSIONS, BUFFER_COPY_TO_MEMORY, CLIENT_VIEW_OF_BUFFER,
  EXECUTABLE_FINGERPRINT, CLIENT_TOPOLOGY, EXECUTABLE_MEMORY_STATS, MEMORY_KIND_ID,
  CONTEXT_CREATE, CONTEXT_DESTROY, BUFFER_RAW_TO_HOST, CLIENT_UNINITIALIZED_BUFFER = 112,
  LOADED_ASSIGNMENT = 117,
  DEVICE_ATTRIBUTES = 128, LOADED_LOGICAL_IDS = 130,
  ERROR_PAYLOADS = 132,
};
enum { FIRST_FUNCTION = 40 };  // bytes

typedef struct {
  size_t struct_size;
  int type;
  void *next;
  Function *destroy, *serialize, *of_client, *of_buffer, *of_topology, *of_results;
} Layouts;
enum { LAYOUTS = 4, TPU_TOPOLOGY = 16 };  // types of extensions

typedef struct {
  size_t struct_size;
  void *extension;
  const char *name;
  size_t name_size;
  int type;
  union { const char *text; int64_t integer; const int64_t *integers; } value;
  size_t value_size;
} NamedValue;
enum { INT64 = 1, INT64_LIST = 2 };

static Function **libtpu, **ours;
static Layouts *libtpu_layouts;

// -- what there is --------------------------------------------------------------------------------


// A caller may look for functions of an object at its start; there are none.
#define OBJECT(...) struct { void *functions; __VA_ARGS__; }
typedef OBJECT(int id; const char *kind) Memory;
typedef OBJECT(void *description; int id) Device;
typedef OBJECT(int type; size_t rank; int64_t dims[16]; long number; Memory *memory;
               bool deleted) Buffer;
typedef struct { const unsigned char *bytes; size_t size; } Bytes;
typedef OBJECT(int number; void *executable; size_t outputs; int *types; int64_t *dims;
               size_t *ranks;
               Bytes assignment) Loaded;

static void *topology;
static void *own_slice;  // the topology of one: libtpu lowers no Mosaic kernel for several
static Device *devices, **device_list;
static size_t device_count;
static Memory memories[] = {
    {NULL, 0, "device"}, {NULL, 1, "pinned_host"}, {NULL, 2, "unpinned_host"}};
static Memory *memory_list[] = {&memories[0], &memories[1], &memories[2]};
enum { MEMORIES = 3 };
static OBJECT(int unused) client, event;  // the event has happened
static FILE *events;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long buffers;

static size_t item_bits(int type) {
  static const unsigned char bits[] = {0, 8, 8, 16, 32, 64, 8, 16, 32, 64, 16, 32, 64, 16, 64, 128,
                                       8, 8, 8, 8, 8, 4, 4, 0, 2, 2, 8, 8, 8, 4, 1, 1};
  return (size_t)type < sizeof bits ? bits[type] : 32;
}
static size_t size_of(const Buffer *b) {
  size_t size = item_bits(b->type);
  for (size_t i = 0; i < b->rank; i++) size *= b->dims[i];
  return (size + 7) / 8;
}
static Buffer *new_buffer(int type, const int64_t *dims, size_t rank, Memory *memory) {
  Buffer *b = calloc(1, sizeof *b);
  if (rank > 16) abort();
  b->type = type, b->rank = rank, b->memory = memory ? memory : memories;
  if (rank) memcpy(b->dims, dims, rank * sizeof *dims);
  pthread_mutex_lock(&lock);
  b->number = buffers++;
  if (b->memory == memories) fprintf(events, "buffer %ld %zu\n", b->number, size_of(b));
  pthread_mutex_unlock(&lock);
  return b;
}

// -- events, devices, memories --------------------------------------------------------------------

static void *nothing(void *args) { return NULL; }
static void *event_is_ready(void *raw) {
  ARGS(void *event; bool out) *a = raw;
  a->out = true;
  return NULL;
}
static void *event_on_ready(void *raw) {
  ARGS(void *event; void (*call)(void *error, void *argument); void *argument) *a = raw;
  a->call(NULL, a->argument);
  return NULL;
}

static void *client_create(void *raw) {
  ARGS(const NamedValue *options; size_t count; void *get, *get_arg, *put, *put_arg;
       void *client) *a = raw;
  const char *name = getenv("PLACEHOLDER_TOPOLOGY");
  const char *bounds = getenv("PLACEHOLDER_CHIPS_PER_HOST");
  int64_t chips[3] = {0};
  NamedValue options[2] = {{sizeof *options, NULL, "num_slices", 10, INT64, {0}, 1},
                           {sizeof *options, NULL, "chips_per_host_bounds", 21, INT64_LIST,
                            {.integers = chips}, 3}};
  options->value.integer = atoi(getenv("PLACEHOLDER_SLICES"));
  if (bounds) sscanf(bounds, "%ld,%ld,%ld", &chips[0], &chips[1], &chips[2]);
  ARGS(const char *name; size_t name_size; const NamedValue *options; size_t count; void *topology)
      create = {sizeof create, NULL, name, strlen(name), options, bounds ? 2 : 1};
  void *error = libtpu[TOPOLOGY_CREATE](&create);
  if (error) return error;
  topology = create.topology;
  options->value.integer = 1;
  error = libtpu[TOPOLOGY_CREATE](&create);
  if (error) return error;
  own_slice = create.topology;
  ARGS(void *topology; void *const *descriptions; size_t count)
      described = {sizeof described, NULL, topology};
  error = libtpu[TOPOLOGY_DESCRIPTIONS](&described);
  if (error) return error;
  device_count = described.count;
  devices = calloc(device_count, sizeof *devices);
  device_list = calloc(device_count, sizeof *device_list);
  for (size_t i = 0; i < device_count; i++) {
    ARGS(void *description; int id) id = {sizeof id, NULL, described.descriptions[i]};
    error = libtpu[DESCRIPTION_ID](&id);
    if (error) return error;
    devices[i] = (Device){NULL, described.descriptions[i], id.id};
    // In the order of their ids, this process's own device first.
    size_t place = i;
    for (; place && device_list[place - 1]->id > id.id; place--)
      device_list[place] = device_list[place - 1];
    device_list[place] = &devices[i];
  }
  char path[4096];
  snprintf(path, sizeof path, "%s/log", getenv("PLACEHOLDER_FOLDER"));
  events = fopen(path, "w");
  if (!events) abort();
  setvbuf(events, NULL, _IOLBF, 0);  // a reader knows all that has happened
  a->client = &client;
  return NULL;
}
static void *client_platform_name(void *raw) {
  ARGS(void *client; const char *out; size_t size) *a = raw;
  a->out = "tpu", a->size = 3;
  return NULL;
}
static void *client_platform_version(void *raw) {
  ARGS(void *client; const char *out; size_t size) *a = raw;
  a->out = "placeholder", a->size = strlen(a->out);
  return NULL;
}
static void *client_process_index(void *raw) {
  ARGS(void *client; int out) *a = raw;
  a->out = 0;
  return NULL;
}
static void *client_devices(void *raw) {
  ARGS(void *client; Device **out; size_t count) *a = raw;
  a->out = device_list, a->count = device_count;
  return NULL;
}
static void *own_device(void *raw) {  // of the client, or of what it has loaded
  ARGS(void *owner; Device **out; size_t count) *a = raw;
  a->out = device_list, a->count = 1;
  return NULL;
}
static void *client_lookup_device(void *raw) {
  ARGS(void *client; int id; Device *out) *a = raw;
  a->out = NULL;
  for (size_t i = 0; i < device_count; i++)
    if (devices[i].id == a->id) a->out = &devices[i];
  if (!a->out) abort();
  return NULL;
}
static void *client_lookup_own_device(void *raw) {
  ARGS(void *client; int id; Device *out) *a = raw;
  a->out = device_list[0];
  return NULL;
}
static void *client_topology(void *raw) {
  ARGS(void *client; void *out) *a = raw;
  a->out = own_slice;
  return NULL;
}
static void *client_default_device_assignment(void *raw) {
  ARGS(void *client; int replicas, partitions; size_t size; int *out) *a = raw;
  for (int i = 0; i < a->replicas * a->partitions; i++) a->out[i] = device_list[i]->id;
  return NULL;
}
static void *device_description(void *raw) {
  ARGS(Device *device; void *out) *a = raw;
  a->out = a->device->description;
  return NULL;
}
// One process a device, numbered as these.
static void *description_process_index(void *raw) {
  ARGS(void *description; int out) *a = raw;
  for (size_t i = 0; i < device_count; i++)
    if (device_list[i]->description == a->description) a->out = (int)i;
  return NULL;
}
static void *device_is_addressable(void *raw) {
  ARGS(Device *device; bool out) *a = raw;
  a->out = a->device == device_list[0];
  return NULL;
}
static void *device_local_hardware_id(void *raw) {
  ARGS(Device *device; int out) *a = raw;
  a->out = 0;
  return NULL;
}
static void *device_attributes(void *raw) {
  ARGS(Device *device; const void *out; size_t count; void *owner;
       void *(*free)(void *)) *a = raw;
  ARGS(void *description; size_t count; const void *out)
      asked = {sizeof asked, NULL, a->device->description};
  void *error = libtpu[DESCRIPTION_ATTRIBUTES](&asked);
  a->out = asked.out, a->count = asked.count, a->owner = NULL, a->free = nothing;
  return error;
}
static void *all_memories(void *raw) {  // of the client or a device
  ARGS(void *owner; Memory **out; size_t count) *a = raw;
  a->out = memory_list, a->count = MEMORIES;
  return NULL;
}
static void *device_memories(void *raw) {
  ARGS(Device *device; Memory **out; size_t count) *a = raw;
  a->out = memory_list, a->count = a->device == device_list[0] ? MEMORIES : 0;
  return NULL;
}
static void *device_default_memory(void *raw) {
  ARGS(Device *device; Memory *out) *a = raw;
  a->out = memories;
  return NULL;
}
static void *device_memory_stats(void *raw) {
  ARGS(Device *device; int64_t used) *a = raw;
  memset((char *)raw + 24, 0, a->struct_size - 24);
  return NULL;
}
static void *memory_id(void *raw) {  // also of its kind
  ARGS(Memory *memory; int out) *a = raw;
  a->out = a->memory->id;
  return NULL;
}
static void *memory_kind(void *raw) {  // also its description
  ARGS(Memory *memory; const char *out; size_t size) *a = raw;
  a->out = a->memory->kind, a->size = strlen(a->out);
  return NULL;
}

// -- buffers --------------------------------------------------------------------------------------

static void *client_buffer_from_host(void *raw) {
  ARGS(void *client; const void *data; int type; const int64_t *dims; size_t rank;
       const int64_t *strides; size_t stride_count; int semantics; Device *device; Memory *memory;
       void *layout; void *done; Buffer *out) *a = raw;
  a->out = new_buffer(a->type, a->dims, a->rank, a->memory);
  a->done = &event;
  return NULL;
}
static void *client_uninitialized_buffer(void *raw) {
  ARGS(void *client; const int64_t *dims; size_t rank; int type; void *layout; Device *device;
       Memory *memory; Buffer *out) *a = raw;
  a->out = new_buffer(a->type, a->dims, a->rank, a->memory);
  return NULL;
}
static void *buffer_delete(void *raw) {
  ARGS(Buffer *buffer) *a = raw;
  pthread_mutex_lock(&lock);
  if (!a->buffer->deleted && a->buffer->memory == memories)
    fprintf(events, "freed %ld\n", a->buffer->number);
  a->buffer->deleted = true;
  pthread_mutex_unlock(&lock);
  return NULL;
}
static void *buffer_destroy(void *raw) {
  ARGS(Buffer *buffer) *a = raw;
  if (a->buffer) buffer_delete(raw), free(a->buffer);
  return NULL;
}
static void *buffer_type(void *raw) {
  ARGS(Buffer *buffer; int out) *a = raw;
  a->out = a->buffer->type;
  return NULL;
}
static void *buffer_dimensions(void *raw) {
  ARGS(Buffer *buffer; const int64_t *out; size_t count) *a = raw;
  a->out = a->buffer->dims, a->count = a->buffer->rank;
  return NULL;
}
static void *buffer_dynamic_dimensions(void *raw) {
  ARGS(Buffer *buffer; const size_t *out; size_t count) *a = raw;
  a->out = NULL, a->count = 0;
  return NULL;
}
static void *buffer_size(void *raw) {
  ARGS(Buffer *buffer; size_t out) *a = raw;
  a->out = size_of(a->buffer);
  return NULL;
}
static void *buffer_device(void *raw) {
  ARGS(Buffer *buffer; Device *out) *a = raw;
  a->out = device_list[0];
  return NULL;
}
static void *buffer_memory(void *raw) {
  ARGS(Buffer *buffer; Memory *out) *a = raw;
  a->out = a->buffer->memory;
  return NULL;
}
static void *buffer_is_deleted(void *raw) {
  ARGS(Buffer *buffer; bool out) *a = raw;
  a->out = a->buffer->deleted;
  return NULL;
}
static void *buffer_is_on_cpu(void *raw) {
  ARGS(Buffer *buffer; bool out) *a = raw;
  a->out = false;
  return NULL;
}
static void *buffer_copy_to_memory(void *raw) {
  ARGS(Buffer *buffer; Memory *memory; Buffer *out) *a = raw;
  a->out = new_buffer(a->buffer->type, a->buffer->dims, a->buffer->rank, a->memory);
  return NULL;
}
static void *buffer_to_host(void *raw) {
  ARGS(Buffer *buffer; void *layout; void *out; size_t size; void *event) *a = raw;
  if (!a->out) return a->size = size_of(a->buffer), NULL;
  memset(a->out, 0, a->size);
  a->event = &event;
  return NULL;
}
static void *buffer_raw_to_host(void *raw) {
  ARGS(Buffer *buffer; void *out; int64_t offset, size; void *event) *a = raw;
  memset(a->out, 0, a->size);
  a->event = &event;
  return NULL;
}
static void *buffer_ready_event(void *raw) {
  ARGS(Buffer *buffer; void *out) *a = raw;
  a->out = &event;
  return NULL;
}
static void *buffer_pointer(void *raw) {
  ARGS(Buffer *buffer; uintptr_t out) *a = raw;
  a->out = (uintptr_t)a->buffer;
  return NULL;
}

// -- layouts: those that the compiler gives arrays by default -----------------------------------

typedef ARGS(void *topology; int type; const int64_t *dims; size_t rank; void *out) LayoutArgs;
static void *layout_of_client(void *raw) {
  LayoutArgs *a = raw, asked = *a;
  asked.topology = topology;
  void *error = libtpu_layouts->of_topology(&asked);
  a->out = asked.out;
  return error;
}
static void *layout_of_buffer(void *raw) {
  ARGS(Buffer *buffer; void *out) *a = raw;
  const Buffer *b = a->buffer;
  LayoutArgs asked = {sizeof asked, NULL, topology, b->type, b->dims, b->rank};
  void *error = libtpu_layouts->of_topology(&asked);
  a->out = asked.out;
  return error;
}

// -- programs -------------------------------------------------------------------------------------

// An entry of env_option_overrides in CompileOptionsProto, appended to a serialized one.
static size_t put_option(char *to, const char *name, const char *text) {
  char value[512];
  size_t size = 0, named = strlen(name);
  if (text) {
    value[size++] = 0x0a, value[size++] = (char)strlen(text);
    memcpy(value + size, text, strlen(text)), size += strlen(text);
  } else {
    value[size++] = 0x10, value[size++] = 1;
  }
  size_t at = 0, whole = 2 + named + 2 + size;
  to[at++] = 0x3a;
  to[at++] = (char)((whole & 0x7f) | 0x80), to[at++] = (char)(whole >> 7);
  to[at++] = 0x0a, to[at++] = (char)named, memcpy(to + at, name, named), at += named;
  to[at++] = 0x12, to[at++] = (char)size, memcpy(to + at, value, size), at += size;
  return at;
}
static uint64_t varint(Bytes *from) {
  uint64_t value = 0;
  for (int shift = 0; from->size; shift += 7) {
    unsigned char byte = *from->bytes++;
    from->size--;
    value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) break;
  }
  return value;
}
// The message or string that a serialized message has as this field; empty if it has none.
static Bytes field_of(Bytes message, uint64_t number) {
  while (message.size) {
    uint64_t tag = varint(&message), kind = tag & 7, size = 0;
    if (kind == 0) varint(&message);
    if (kind == 1) size = 8;
    if (kind == 5) size = 4;
    if (kind == 2) size = varint(&message);
    if (size > message.size) break;
    if (kind == 2 && tag >> 3 == number) return (Bytes){message.bytes, size};
    message.bytes += size, message.size -= size;
  }
  return (Bytes){NULL, 0};
}
enum { BUILD_OPTIONS = 3, DEVICE_ASSIGNMENT = 9 };  // in CompileOptionsProto, and in these options
static void *client_compile(void *raw) {
  ARGS(void *client; const void *program; const char *options; size_t size; Loaded *out) *a = raw;
  static int programs;
  static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&one_at_a_time);
  Loaded *loaded = calloc(1, sizeof *loaded);
  loaded->number = programs++;
  char folder[120];  // the length of a field above is one byte
  size_t length = snprintf(folder, sizeof folder, "%s/%d", getenv("PLACEHOLDER_FOLDER"),
                           loaded->number);
  if (length >= sizeof folder) abort();
  mkdir(folder, 0700);
  char *options = malloc(a->size + 1024);
  memcpy(options, a->options, a->size);
  size_t size = a->size;
  size += put_option(options + size, "xla_dump_to", folder);
  size += put_option(options + size, "xla_dump_hlo_as_text", NULL);
  struct timespec from, to;
  clock_gettime(CLOCK_MONOTONIC, &from);
  ARGS(void *topology; const void *program; const char *options; size_t size; void *client;
       void *out)
      compile = {sizeof compile, NULL, topology, a->program, options, size};
  void *error = libtpu[COMPILE](&compile);
  clock_gettime(CLOCK_MONOTONIC, &to);
  free(options);
  pthread_mutex_unlock(&one_at_a_time);
  if (error) return error;
  loaded->executable = compile.out;
  Bytes build_options = field_of((Bytes){(const void *)a->options, a->size}, BUILD_OPTIONS);
  Bytes found = field_of(build_options, DEVICE_ASSIGNMENT);
  loaded->assignment = (Bytes){memcpy(malloc(found.size + 1), found.bytes, found.size), found.size};
  ARGS(void *executable; int *types; size_t count) types = {sizeof types, NULL, compile.out};
  ARGS(void *executable; size_t count; int64_t *dims; size_t *ranks)
      dims = {sizeof dims, NULL, compile.out};
  ARGS(void *executable; int64_t code, arguments, outputs, aliased, temporaries, host[5], peak,
       total)
      memory = {sizeof memory, NULL, compile.out};
  if ((error = libtpu[EXECUTABLE_OUTPUT_TYPES](&types))
      || (error = libtpu[EXECUTABLE_OUTPUT_DIMENSIONS](&dims))
      || (error = libtpu[EXECUTABLE_MEMORY_STATS](&memory)))
    return error;
  loaded->outputs = types.count, loaded->types = types.types;
  loaded->dims = dims.dims, loaded->ranks = dims.ranks;
  pthread_mutex_lock(&lock);
  fprintf(events, "compiled %d %ld %ld %ld %ld %ld %ld\n", loaded->number,
          (to.tv_sec - from.tv_sec) * 1000000000L + to.tv_nsec - from.tv_nsec,
          (long)memory.arguments, (long)memory.outputs, (long)memory.aliased,
          (long)memory.temporaries, (long)memory.peak);
  pthread_mutex_unlock(&lock);
  a->out = loaded;
  return NULL;
}
static void *loaded_executable(void *raw) {
  ARGS(Loaded *loaded; void *out) *a = raw;
  a->out = a->loaded->executable;
  return NULL;
}
static void *loaded_logical_ids(void *raw) {
  static struct { int replica, partition; } first;
  ARGS(Loaded *loaded; void *out; size_t count) *a = raw;
  a->out = &first, a->count = 1;
  return NULL;
}
static void *loaded_assignment(void *raw) {
  ARGS(Loaded *loaded; Bytes out; void *owner; void *(*free)(void *)) *a = raw;
  a->out = a->loaded->assignment, a->owner = NULL, a->free = nothing;
  return NULL;
}
static void *loaded_is_deleted(void *raw) {
  ARGS(Loaded *loaded; bool out) *a = raw;
  a->out = false;
  return NULL;
}
static void *loaded_execute(void *raw) {
  typedef ARGS(void *sends, *receives; size_t counts[2]; int launch; const int64_t *kept;
               size_t kept_count) Options;
  ARGS(Loaded *loaded; Options *options; Buffer *const *const *arguments;
       size_t device_count, argument_count; Buffer **const *results; void **complete;
       void *device) *a = raw;
  Loaded *loaded = a->loaded;
  const int64_t *dims = loaded->dims;
  for (size_t i = 0; i < loaded->outputs; dims += loaded->ranks[i++])
    a->results[0][i] = new_buffer(loaded->types[i], dims, loaded->ranks[i], NULL);
  pthread_mutex_lock(&lock);
  fprintf(events, "executed %d", loaded->number);
  for (size_t i = 0; i < a->argument_count; i++)
    fprintf(events, " %ld", a->arguments[0][i]->number);
  fprintf(events, " ->");
  for (size_t i = 0; i < a->options->kept_count; i++) fprintf(events, " %ld", a->options->kept[i]);
  fprintf(events, " ->");
  for (size_t i = 0; i < loaded->outputs; i++)
    fprintf(events, " %ld", a->results[0][i]->number);
  fprintf(events, "\n");
  pthread_mutex_unlock(&lock);
  if (a->complete) a->complete[0] = &event;
  return NULL;
}

// -- the interface --------------------------------------------------------------------------------

static void *missing(void *args) {
  fprintf(stderr, "placeholder_tpu: no such function here (arguments of %zu bytes)\n",
          *(size_t *)args);
  abort();
}

const void *GetPjrtApi(void) {
  static char *api;
  if (api) return api;
  void *library = dlopen(getenv("PLACEHOLDER_LIBTPU"), RTLD_NOW | RTLD_LOCAL);
  const char *(*get)(void) = library ? (const char *(*)(void))dlsym(library, "GetPjrtApi") : NULL;
  if (!get) {
    fprintf(stderr, "placeholder_tpu: no libtpu at PLACEHOLDER_LIBTPU: %s\n", dlerror());
    return NULL;
  }
  const char *theirs = get();
  size_t size = *(const size_t *)theirs;
  api = memcpy(malloc(size), theirs, size);
  libtpu = (Function **)(theirs + FIRST_FUNCTION);
  ours = (Function **)(api + FIRST_FUNCTION);

  // Extensions: layouts, and what describes a topology, which a Mosaic kernel is lowered by.
  static Layouts layouts;
  Layouts *of_topology = NULL;
  for (Layouts *each = *(Layouts **)(theirs + 8); each; each = each->next) {
    if (each->type == LAYOUTS) libtpu_layouts = each;
    if (each->type == TPU_TOPOLOGY)
      of_topology = memcpy(malloc(each->struct_size), each, each->struct_size);
  }
  if (!libtpu_layouts) abort();
  size_t known = libtpu_layouts->struct_size;
  memcpy(&layouts, libtpu_layouts, known < sizeof layouts ? known : sizeof layouts);
  layouts.struct_size = sizeof layouts;
  if (of_topology) of_topology->next = NULL;
  layouts.next = of_topology;
  layouts.of_client = layout_of_client, layouts.of_buffer = layout_of_buffer;
  *(Layouts **)(api + 8) = &layouts;

  // libtpu's own: errors, the plugin, descriptions of devices, executables, topologies,
  // compilation.
  size_t count = (size - FIRST_FUNCTION) / sizeof *ours;
  for (size_t i = EVENT_DESTROY; i < count; i++) {
    bool is_libtpus =
        (i >= DESCRIPTION_ID && i <= DESCRIPTION_TO_STRING && i != DESCRIPTION_PROCESS_INDEX)
        || (i > EXECUTABLE_DESTROY && i <= EXECUTABLE_SERIALIZE)
        || (i >= TOPOLOGY_CREATE && i <= EXECUTABLE_OUTPUT_DIMENSIONS)
        || i == EXECUTABLE_FINGERPRINT || i == EXECUTABLE_MEMORY_STATS || i == ERROR_PAYLOADS;
    if (!is_libtpus) ours[i] = missing;
  }
  ours[EVENT_DESTROY] = ours[EVENT_ERROR] = ours[EVENT_AWAIT] = nothing;
  ours[EVENT_IS_READY] = event_is_ready, ours[EVENT_ON_READY] = event_on_ready;
  ours[CLIENT_CREATE] = client_create, ours[CLIENT_DESTROY] = nothing;
  ours[CLIENT_PLATFORM_NAME] = client_platform_name;
  ours[CLIENT_PLATFORM_VERSION] = client_platform_version;
  ours[CLIENT_PROCESS_INDEX] = client_process_index;
  ours[CLIENT_DEVICES] = client_devices, ours[CLIENT_ADDRESSABLE_DEVICES] = own_device;
  ours[CLIENT_LOOKUP_DEVICE] = client_lookup_device;
  ours[CLIENT_LOOKUP_ADDRESSABLE_DEVICE] = client_lookup_own_device;
  ours[CLIENT_ADDRESSABLE_MEMORIES] = all_memories, ours[CLIENT_TOPOLOGY] = client_topology;
  ours[CLIENT_DEFAULT_DEVICE_ASSIGNMENT] = client_default_device_assignment;
  ours[CLIENT_COMPILE] = client_compile, ours[CLIENT_BUFFER_FROM_HOST] = client_buffer_from_host;
  ours[CLIENT_UNINITIALIZED_BUFFER] = client_uninitialized_buffer;
  ours[DESCRIPTION_PROCESS_INDEX] = description_process_index;
  ours[DEVICE_DESCRIPTION] = device_description;
  ours[DEVICE_IS_ADDRESSABLE] = device_is_addressable;
  ours[DEVICE_LOCAL_HARDWARE_ID] = device_local_hardware_id;
  ours[DEVICE_MEMORIES] = device_memories;
  ours[DEVICE_DEFAULT_MEMORY] = device_default_memory;
  ours[DEVICE_MEMORY_STATS] = device_memory_stats;
  if (count <= LOADED_LOGICAL_IDS) abort();  // an older interface than this was written for
  ours[DEVICE_ATTRIBUTES] = device_attributes, ours[LOADED_LOGICAL_IDS] = loaded_logical_ids;
  ours[LOADED_ASSIGNMENT] = loaded_assignment;
  ours[MEMORY_ID] = ours[MEMORY_KIND_ID] = memory_id;
  ours[MEMORY_KIND] = ours[MEMORY_DEBUG_STRING] = ours[MEMORY_TO_STRING] = memory_kind;
  ours[MEMORY_DEVICES] = own_device;
  ours[EXECUTABLE_DESTROY] = ours[LOADED_DESTROY] = ours[LOADED_DELETE] = nothing;
  ours[LOADED_EXECUTABLE] = loaded_executable, ours[LOADED_DEVICES] = own_device;
  ours[LOADED_IS_DELETED] = loaded_is_deleted, ours[LOADED_EXECUTE] = loaded_execute;
  ours[CONTEXT_CREATE] = ours[CONTEXT_DESTROY] = nothing;
  ours[BUFFER_DESTROY] = buffer_destroy, ours[BUFFER_DELETE] = buffer_delete;
  ours[BUFFER_TYPE] = buffer_type, ours[BUFFER_SIZE] = buffer_size;
  ours[BUFFER_DIMENSIONS] = ours[BUFFER_UNPADDED_DIMENSIONS] = buffer_dimensions;
  ours[BUFFER_DYNAMIC_DIMENSIONS] = buffer_dynamic_dimensions;
  ours[BUFFER_DEVICE] = buffer_device, ours[BUFFER_MEMORY] = buffer_memory;
  ours[BUFFER_IS_DELETED] = buffer_is_deleted, ours[BUFFER_IS_ON_CPU] = buffer_is_on_cpu;
  ours[BUFFER_COPY_TO_MEMORY] = buffer_copy_to_memory;
  ours[BUFFER_TO_HOST] = buffer_to_host, ours[BUFFER_RAW_TO_HOST] = buffer_raw_to_host;
  ours[BUFFER_READY_EVENT] = buffer_ready_event;
  ours[BUFFER_POINTER] = ours[BUFFER_DATA_POINTER] = buffer_pointer;
  ours[BUFFER_MORE_REFERENCES] = ours[BUFFER_LESS_REFERENCES] = nothing;
  return api;
}
