"""FSDP2 (PyTorch's ``fully_shard``) with one unit per block: sharding, steps and checkpoints.

(Megatron-FSDP is in ``gpu_fsdp/megatron.py``.)
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.initialize import cast_buffers
from models.positions import PartOfPositions
from models.spec import Units
from torch_fsdp.devices import Device
from torch_fsdp.domain import DomainGroup, attend_over_processes, make_meshes, token_part
from torch_fsdp.parallel_plan import OUTER, SHARD, TorchRun, parallelize_block, sharded_dim
from torch_fsdp.torch_backend import TorchBackend
from torch_fsdp.varlen import use_varlen
from tpu_attention.choice import choose_mask
from training.backend import InitializeModule
from training.checkpoints.state import Chunk, ShardedTensor


class Fsdp2Backend(TorchBackend):
    def __init__(self, run: TorchRun, device: Device) -> None:
        super().__init__(run, device)
        self._mesh, self._image_mesh, self._domain = make_meshes(run, device)
        self.shards = (self._mesh.get_local_rank(SHARD),)
        self._positions: dict[str, PartOfPositions] = {}
        """Position embeddings that are split over the processes that share an image."""
        self._form = "FSDP2 as data parallel (no sharding)"
        if self._zero:
            self._form = f"FSDP2 ZeRO-{self._zero}, one unit per block"
        if self._plan.domain_attention:
            self._form += f", {self._plan.domain_attention} attention over domain"
        if self._plan.varlen:
            self._form += ", variable-length attention"

    def parallelize(
        self, model: nn.Module, units: Units, initialize: InitializeModule
    ) -> nn.Module:
        """Initialize, modify and shard the model.

        Host and device hold one whole unit at a time: it is initialized on the CPU and copied to
        the device, where only this process's part is kept.
        """
        run, plan, device = self._run, self._plan, self._device

        # Domain parallelism: attention sees the tokens of all processes that share an image.
        if self._domain:
            attend_over_processes(model, plan, self._domain)

        # Sequences of several images: variable-length attention kernels.
        if plan.varlen:
            use_varlen(model, run.model)

        # Attention by kernels knows images by their numbers.
        choose_mask(model, plan.attention)

        # Each block: weights; attention, form, recomputation, torch.compile; then sharding.
        blocks = []
        for name, block in units[:-1]:
            initialize(block, name)
            block = parallelize_block(model, name, block, plan, device.where)
            cast_buffers(block, plan.dtype)
            _move(block, device)
            blocks.append(_shard(block, run, self._mesh))

        # Around the blocks: embedding, norm, head, the modules still on meta.
        initialize(model, "")
        _move(model, device)

        # Domain parallelism: each process has the positions of its tokens.
        if self._domain:
            self._shard_positions(model, self._domain)

        # The root: the parameters that are not sharded yet.
        _shard(model, run, self._mesh, is_root=True)

        # Prefetching: how many blocks are unsharded ahead of the current one.
        ahead, behind = run.backend_config.forward_prefetch, run.backend_config.backward_prefetch
        for i, sharded in enumerate(blocks):
            if ahead:
                sharded.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
            # An empty list selects PyTorch's default, one block ahead. The block itself, which is
            # already unsharded, disables prefetching.
            before = blocks[max(0, i - behind) : i][::-1]
            sharded.set_modules_to_backward_prefetch(before or [sharded])

        # Changes to the whole model that the implementation of the blocks needs.
        plan.blocks.wrap_model(model)

        # The parameters by names in the plain model, and the processes that shard them.
        self._model = model
        positions = {id(part.values): name for name, part in self._positions.items()}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            name = positions.get(id(parameter)) or plan.blocks.timm_name(name)
            self._parameters[name] = parameter
        names, shard_group = self._parameters.keys(), self._mesh.get_group(SHARD)
        self._sharded_alike = [(names, [shard_group])]
        if self._zero == 0 and self._domain and self._positions:
            # Without sharding, all parameters are replicated, but positions differ along "domain".
            self._sharded_alike = [
                (names - self._positions.keys(), [shard_group]),
                (self._positions.keys(), [self._domain.group]),
            ]
        return model

    def _shard_positions(self, model: nn.Module, domain: DomainGroup) -> None:
        """Give each process the positions of its tokens, sharded over processes with the same ones.

        FSDP averages these gradients over dcn x fsdp, but all others over dcn x fsdp x domain, so
        divide these by the size of domain.
        """
        self._positions = self._run.model.compute_on_part(model, token_part(domain, domain.first))

        def divide_gradient(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda grad: grad * (1 / self._run.mesh.domain))

        for module in self._positions.values():
            _shard(module, self._run, self._image_mesh)
            module.register_forward_hook(divide_gradient)

    # -- a step -----------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        root = self._model
        assert isinstance(root, FSDPModule)
        # Gradient accumulation: reduce-scatter gradients after each micro-batch, so that no process
        # holds them whole, but all-reduce over replicas only once. ZeRO-2 keeps weights unsharded.
        root.set_requires_all_reduce(is_last)
        root.set_is_last_backward(is_last)
        if self._zero != 3:
            root.set_reshard_after_backward(is_last)
        scaled = loss if self._loss_scale is None else loss * self._loss_scale.value
        scaled.backward()

    def _collect_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter.grad, DTensor):
                self._locals[name].grad = parameter.grad.to_local()

    # -- checkpoints ------------------------------------------------------------------

    def _after_load(self) -> None:
        # A forward pass leaves the root unsharded for the backward pass. After an evaluation, which
        # has none, these weights would be stale.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _global_view(self, name: str, values: torch.Tensor) -> torch.Tensor:
        parameter = self._parameters[name]
        shape, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        assert values.shape == torch.Size(shape)
        chunks = [Chunk(offsets, values)] if values.numel() else []
        if name not in self._positions:
            return ShardedTensor(parameter.shape, values.dtype, chunks)
        first = self._positions[name].first
        for chunk in chunks:
            chunk.offsets = (chunk.offsets[0], chunk.offsets[1] + first, chunk.offsets[2])
        entries = self._run.model.sizes.num_patches + self._run.model.token_parameters[name]
        whole = (parameter.shape[0], entries, parameter.shape[2])
        return ShardedTensor(whole, values.dtype, chunks)


def _move(unit: nn.Module, device: Device) -> None:
    """Move the tensors that are not sharded and not yet on the device to the device.

    ``fully_shard`` would set a parameter's data to move it, which PyTorch rejects for a TPU.
    """
    for module in unit.modules():
        for name, values in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if isinstance(values, DTensor) or values.device.type == device.where.type:
                continue
            moved = values.detach().to(device.where)
            if isinstance(values, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=values.requires_grad)
            setattr(module, name, moved)


def _shard(
    unit: nn.Module, run: TorchRun, mesh: DeviceMesh, *, is_root: bool = False
) -> FSDPModule:
    plan = run.plan
    shard = mesh[SHARD]  # sliced from the whole mesh: PyTorch warns about a slice of a slice
    lower = {plan.dtype, plan.reduce_dtype} != {torch.float32}

    fully_shard(
        unit,
        mesh=mesh[OUTER, SHARD] if mesh.size(0) > 1 else shard,
        shard_placement_fn=lambda parameter: Shard(sharded_dim(parameter.shape, shard.size())),
        # The backward pass would unshard the root's weights again immediately.
        reshard_after_forward=plan.zero == 3 and not is_root,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=plan.dtype if lower else None,
            reduce_dtype=plan.reduce_dtype if lower else None,
            output_dtype=torch.float32 if is_root else None,
        ),
        offload_policy=CPUOffloadPolicy() if run.backend_config.cpu_offload else OffloadPolicy(),
    )
    assert isinstance(unit, FSDPModule)
    # Uneven shards get their final, padded storage when they are first unsharded; do that before
    # the optimizer holds references to them.
    unit.unshard()
    unit.reshard()
    return unit
