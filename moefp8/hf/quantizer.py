"""What happens to a model while it is loaded: modules are swapped, the checkpoint is checked."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from weakref import ref
from zipfile import is_zipfile

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
)
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ..checkpoint import CheckpointError
from ..checkpoint.files.config import (
    config_path,
    format_name,
    has_ambiguous_blocks,
    quantization_of,
    read_config,
)
from ..checkpoint.files.header import FP8, Entry
from ..checkpoint.files.names import Rename, weight_of_scale
from ..checkpoint.files.reading import open_files
from ..checkpoint.files.safe_read import check_inside
from ..checkpoint.files.source import Source, disagreement, open_shards
from ..checkpoint.inspect.fp8 import fp8_modules_of
from ..checkpoint.load.assign import Copy, assign_fp8
from ..checkpoint.load.load import check_scales
from ..checkpoint.model.fit import widens
from ..checkpoint.model.skeleton import renaming
from ..checkpoint.model.slots import Inventory
from ..kernels import E4M3
from ..layers import Conversion, FP8Linear, GroupedExperts, convert, dequantize, plan_conversion
from ..layers.adapter import check_no_adapters
from ..layers.conversion.choose import OFFLOADED
from ..layers.module import FixedDtypeModule
from ..layers.parts import parts_of
from ..layers.saving import ADOPTERS, KNOWERS
from ..layers.trainable import TrainableModule
from .config import METHOD, FP8Config
from .distributed import add_scales, check_distributed, held_experts, keep_parts, refuse_parallel
from .filled import check_filled
from .merge import SCALE, copying_once, is_target, with_scales
from .placement import unhooked
from .versions import has_ep_implementations


@register_quantizer(METHOD)
class FP8Quantizer(HfQuantizer):
    """Swaps linears and experts for moefp8's; transformers' own loader fills them.

    Before an FP8 checkpoint is read, its headers are held against the model: a missing or extra
    expert, a weight without its scale or a wrong shape is a CheckpointError. Whatever else the
    model lacks is one when all is read (`check_filled`).

    is_trainable: gradients flow through FP8 weights, which stay as they are, to whatever else asks
        for one: adapters, norms, routers, embeddings; and to master weights after
        `moefp8.unfreeze(model)`.
    conversion: what became FP8, and what stayed, in a checkpoint that was not FP8.
    """

    is_trainable = True
    is_compileable = True
    _model: Callable[[], nn.Module | None] = staticmethod(lambda: None)

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        is_ours = isinstance(quantization_config, FP8Config)  # it may be transformers' own
        self.quantization_config: Any = quantization_config if is_ours else FP8Config()
        self._scale_leaves: set[str] = set()  # what the checkpoint calls scales, if not SCALE
        self._scales: list[str] = []  # names of the model's scales
        self._known: list[Any] | None = None  # conversions of keys from before `convert`
        self._loaded: list[str] | None = None  # names of FP8 weights that an FP8 checkpoint gave
        self._recorded: list[Any] | None = None  # conversions of the keys of that checkpoint
        self.conversion = Conversion()

    @property
    def is_qat_trainable(self) -> bool:
        """Whether anything but FP8 weights asks for a gradient.

        transformers' `Trainer` takes a quantized model if it says so, or if PEFT wraps it. A copy
        does not know its model, and leaves the answer to the backward.
        """
        model = self._model()
        if model is None or any(x.requires_grad and x.dtype != E4M3 for x in model.parameters()):
            return True
        warnings.warn(
            f"{type(model).__name__}: nothing of it trains, since FP8 codes are frozen; "
            "moefp8.unfreeze(model) makes master weights of them, and "
            "moefp8.adapters.add_lora(model) adapters beside them",
            stacklevel=2,
        )
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_model"}

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._see(model)
        if not self.pre_quantized:
            check_distributed(model, pre_quantized=False)
        files = [Path(file) for file in checkpoint_files or ()]
        _check_places(model, files)
        is_safetensors = bool(files) and all(file.suffix == ".safetensors" for file in files)
        if not is_safetensors:
            if self.pre_quantized:
                raise CheckpointError(
                    "moefp8.hf: FP8 checkpoints must be .safetensors files, got "
                    f"{', '.join(map(str, files)) or 'none'}"
                )
            _refuse_quantized_pickles(files)
            _refuse_fp8(_fp8_in_pickles(files))
            return
        source = open_shards(files)
        if problem := disagreement(source, source.entries.values()):
            raise CheckpointError(f"{source.path}: {problem}")
        if not self.pre_quantized:
            _refuse_fp8(entry for entry in source.entries.values() if entry.dtype == FP8)
            _widen(source, model, _rename_of(model, self))
            return
        self.quantization_config = FP8Config.of_checkpoint(quantization_of(source.config) or {})
        scales = (key for key in source.entries if weight_of_scale(key) in source.entries)
        self._scale_leaves = {key.rpartition(".")[2] for key in scales} & {"weight_scale", "scale"}
        convert(model, only=fp8_modules_of(source, model, rename=_rename_of(model, self)))
        self._see(model)
        check_distributed(model, pre_quantized=True)
        rename = _rename_of(model, self)
        _check(source, model, rename)
        _widen(source, model, rename)

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """transformers calls this with the plans of tensor and of expert parallelism."""
        add_scales(model, plan)

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel | None = None
    ) -> list[Any]:
        """transformers' conversions, after renamings of scales that have names of their own.

        Scales are stacked as their weights are, and experts that are stored one by one are copied
        once. Older transformers does not pass `model`; then it is the one that was seen last.
        """
        if model is not None:
            self._see(model)
        renamings = [
            WeightRenaming(rf"\.{leaf}(?!_inv)", ".weight_scale_inv")
            for leaf in sorted(self._scale_leaves)
        ]
        conversions = [x for each in weight_conversions for x in with_scales(each, self._scales)]
        return renamings + [copying_once(conversion) for conversion in conversions]

    def _see(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._scales = [name for name, _ in model.named_parameters() if name.endswith(SCALE)]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if (getattr(model, "_tp_size", None) or 1) > 1 and not has_ep_implementations():
            # Parts may be plain tensors.
            refuse_parallel(f"{type(model).__name__}: in {model._tp_size} parts")
        keep_parts(model)
        check_filled(model)
        if self.pre_quantized:
            for name, module in model.named_modules():
                if isinstance(module, FP8Linear | GroupedExperts):
                    _complete(name, module)
            self._loaded = _weights_of(model)
            self._recorded = getattr(model, "_weight_conversions", None)
            return model
        arguments = self.quantization_config.arguments
        with unhooked(model):
            _, self.conversion = convert(model, **arguments, return_conversion=True)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """`save_pretrained` calls this before it writes config.json: modules may have changed."""
        if parts := [name for name, module in model.named_modules() if parts_of(module)]:
            raise CheckpointError(
                f"save_pretrained: {len(parts)} modules hold one rank's part alone ({parts[0]}, "
                "...); save a model that is loaded in one process"
            )
        check_no_adapters("save_pretrained", model, "whose keys from_pretrained does not know")
        if _weights_of(model):
            self.prepare_to_save(model)
        else:
            self.remove_quantization_config(model)
        return super().get_state_dict_and_metadata(model)

    def prepare_to_save(self, model: Any) -> None:
        """Decide what config.json will list, and which conversions of keys saving reverts.

        Both are those of the FP8 checkpoint while the modules are those that it gave. Otherwise the
        model's conversions are from before there were scales. Those that rename stacks would leave
        out their scales, and those that cut a fused weight would cut blocks: these are dropped, and
        the weights keep the model's names.
        """
        model.config.quantization_config = self.quantization_config
        names, stacks = _weights_of(model), _weights_of(model, GroupedExperts)
        if names == self._loaded:
            self.quantization_config.kept = None
            model._weight_conversions = self._recorded
            return
        if self._known is None:
            recorded = getattr(model, "_weight_conversions", None)
            self._known = recorded or _conversions_to_revert(model)
        plan = plan_conversion(model, filter_fn=lambda module, name: False)
        trained = (
            name
            for name, module in model.named_modules()
            if isinstance(module, TrainableModule) and module.trainable
        )
        self.quantization_config.kept = sorted({*plan.kept, *trained})
        self.quantization_config.says_separate = any(
            isinstance(module, GroupedExperts)
            and not module.trainable
            and has_ambiguous_blocks(module.intermediate_size)
            for module in model.modules()
        )
        conversions = self.update_weight_conversions(self._known, model)
        with_scale = [x for name in stacks for x in (name, f"{name}{SCALE}")]
        model._weight_conversions = [
            x for x in conversions if not (_renames(x, with_scale) or _cuts(x, names))
        ]

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """transformers' own `model.dequantize()` calls this."""
        return dequantize(model, dtype)


def _adopt(module: nn.Module, conversion: Conversion) -> bool:
    """Let a converted model of transformers be saved as if it had been loaded so."""
    if not isinstance(module, PreTrainedModel):
        return False
    model: Any = module
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, FP8Quantizer):
        if getattr(model, "is_quantized", False):  # we are loading it, or another did it
            return quantizer is None
        model.hf_quantizer = quantizer = FP8Quantizer(FP8Config(), pre_quantized=False)
    quantizer.prepare_to_save(model)
    return True


ADOPTERS.append(_adopt)
KNOWERS.append(lambda model: isinstance(getattr(model, "hf_quantizer", None), FP8Quantizer))


def _weights_of(model: nn.Module, kind: type[FixedDtypeModule] = FixedDtypeModule) -> list[str]:
    """The names of FP8 weights in modules of that kind."""
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if isinstance(module, kind)
        for leaf in module.fp8_names
    ]


def _conversions_to_revert(model: PreTrainedModel) -> list[Any]:
    """What transformers reverts when it saves a model that it did not load."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [x for x in conversions if not isinstance(x, PrefixChange)]


def _cuts(conversion: Any, names: list[str]) -> bool:
    """Whether it fuses one of the named weights, or its scales, from other keys than experts'."""
    if not isinstance(conversion, WeightConverter):
        return False
    if any(isinstance(step, MergeModulelist) for step in conversion.operations):
        return False
    named = [*names, *(f"{name}{SCALE}" for name in names)]
    targets = conversion._original_target_patterns
    return any(is_target(target, name, or_above=True) for target in targets for name in named)


def _renames(conversion: Any, names: list[str]) -> bool:
    """Whether it does no more than give one of these names another when the model is saved."""
    if not isinstance(conversion, WeightRenaming):
        return False
    reverse = conversion.reverse_transform()
    last = {name.rpartition(".")[2] for name in names}
    is_stack = any(str(x).rpartition(".")[2] in last for x in conversion.target_patterns)
    return is_stack and any(reverse.rename_source_key(name)[1] is not None for name in names)


def _rename_of(model: PreTrainedModel, quantizer: HfQuantizer) -> Rename:
    """Checkpoint key -> model key, as transformers renames it with this quantizer."""
    conversions = get_model_conversion_mapping(model, None, quantizer)
    return renaming(model, conversions, Inventory(model))


def _check_places(model: Any, files: list[Path]) -> None:
    """Refuse files outside of the checkpoint's directory, which an index or a link may name."""
    directory = str(getattr(model.config, "_name_or_path", "") or "")
    if not os.path.isdir(directory):
        return
    home = Path(os.path.abspath(directory))
    for file in files:
        if not Path(os.path.abspath(file)).is_relative_to(home):
            raise CheckpointError(
                f"{file}: must lie in {home}, whose index names it; remove it from the index"
            )
        check_inside(file, home)


def _fp8_in_pickles(files: list[Path]) -> Iterator[str]:
    """FP8 tensors that torch.save wrote; no data is read. Its old format, not a zip, has none."""
    for file in filter(is_zipfile, files):
        try:
            stored = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        except UnpicklingError:  # it holds more than tensors, which transformers may refuse
            continue
        for name, x in stored.items():
            if isinstance(x, torch.Tensor) and x.dtype == E4M3:
                yield f"{name} in {file}"


def _refuse_fp8(entries: Iterator[Entry] | Iterator[str]) -> None:
    """Refuse FP8 tensors: without a config that says FP8, codes would be taken for weights."""
    if (first := next(entries, None)) is not None:
        raise CheckpointError(
            f"{first}: FP8, but the model's config has no quantization_config, so its scales would "
            "be left out; fetch the checkpoint's own config.json, pass "
            "config=moefp8.hf.pretrained_config(path), or use moefp8.load_checkpoint, which goes "
            "by the scales"
        )


def _refuse_quantized_pickles(files: list[Path]) -> None:
    """Refuse what is no safetensors file beside a config.json that says it is quantized."""
    config = read_config(files[0]) if files and config_path(files[0]).exists() else {}
    if quantization_of(config) is not None:
        raise CheckpointError(
            f"{files[0]}: config.json says {format_name(config)}, but only .safetensors files are "
            "loaded in FP8; quantize the 16-bit original (python -m moefp8 quantize)"
        )


def _check(source: Source, model: nn.Module, rename: Rename) -> None:
    """Hold headers against the model, and look at the values of scales."""
    assignment = assign_fp8(source, Inventory(model), rename)
    assignment.copies = [copy for copy in assignment.copies if _is_held(copy, model)]
    with ExitStack() as stack:
        files = open_files(stack, assignment.entries(), source.shards)
        check_scales(assignment, files, source)


def _is_held(copy: Copy, model: nn.Module) -> bool:
    """Whether it is not an expert of another rank."""
    index = copy.slot.index
    return not index or index[0] in held_experts(model, len(copy.slot.owner.tensor))


def _widen(source: Source, model: nn.Module, rename: Rename) -> None:
    """Make correction biases FP32 where the checkpoint holds them in FP32."""
    inventory = Inventory(model)
    for key, entry in source.entries.items():
        slot = inventory.find(rename(key))
        if slot is not None and widens(entry, slot):
            owner = slot.owner
            owner.replace(torch.empty_like(owner.tensor, dtype=torch.float32))


def _complete(name: str, module: FixedDtypeModule) -> None:
    """Make scales FP32 and parameters frozen; refuse what transformers' loader left unfilled."""
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        if is_traceable_wrapper_subclass(parameter):
            refuse_parallel(f"{name}.{leaf}: a {type(parameter).__name__}")
        if parameter.is_meta:
            raise ValueError(f"{name}.{leaf}: {OFFLOADED}")
        if not getattr(parameter, "_is_hf_initialized", False):
            raise CheckpointError(
                f"{name}.{leaf}: was not loaded, though the checkpoint holds it: transformers "
                "knows no conversion of its keys; use moefp8.load_checkpoint"
            )
        parameter.requires_grad_(False)
        if leaf in module.fp32_names and parameter.dtype != torch.float32:
            module._parameters[leaf] = nn.Parameter(parameter.float(), requires_grad=False)
