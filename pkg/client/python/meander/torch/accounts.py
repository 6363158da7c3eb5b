"""Accounts for every setting of a folder: it is used, known to have no effect, or refused by its name.

What a network or a configuration class of the libraries takes is theirs to use: we load it by the same class as the
pipeline of diffusers. Here is what no class asks for, and what the pipeline itself would do and a worker does not.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from .faults import Fault

if TYPE_CHECKING:
    from .family import Family
    from .folder import Folder
    from .whole import Pipeline

SCHEDULER = ("scheduler", "scheduler_config.json")
"""The file of a folder's scheduler."""

WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
        "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id prefix use_cache "
        "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens decoder_start_token_id bos_token_id eos_token_id pad_token_id sep_token_id "
        "output_past".split(),
        "a text encoder generates nothing",
    ),
    **dict.fromkeys(
        "dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout hidden_dropout_prob classifier_dropout "
        "gradient_checkpointing pretraining_tp finetuning_task task_specific_params".split(),
        "of training alone",
    ),
    **dict.fromkeys(
        "torch_dtype dtype use_bfloat16 torchscript tf_legacy_loss tokenizer_class auto_map pruned_heads "
        "quantization_config".split(),
        "of loading, which the worker does by its own settings; quantized weights are refused",
    ),
    **dict.fromkeys(
        "add_cross_attention cross_attention_hidden_size tie_encoder_decoder tie_word_embeddings is_decoder "
        "n_positions "
        "scalable_attention vision_token_id in_chans spatial_patch_size".split(),
        "transformers had a use of it once, in other classes or none",
    ),
    **dict.fromkeys(("rope_theta", "rope_scaling"), "transformers reads it as rope_parameters"),
}
"""Of configurations of text encoders: what no class of transformers asks for, with the reason."""

OF_NETWORKS = {
    "pooled_projection_dim": "QwenImageTransformer2DModel never had a use of it",
    "quantization_config": WITHOUT_EFFECT["quantization_config"],
}
"""The same of networks of diffusers."""

ACCOUNTED = {
    "StableDiffusion3Pipeline", "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline", "ZImagePipeline", "WanPipeline",
    "HunyuanVideoPipeline", "LTXPipeline",
}  # fmt: skip
"""Whole pipelines of whose parts all settings are known; others may have some that diffusers leaves."""

OF_SETTINGS = {
    "frames", "height", "width", "fps", "num_inference_steps", "true_cfg_scale", "guidance_scale", "reward",
}  # fmt: skip
"""What meander.json may have; the host reads reward."""

_ROPE = (
    "type rope_type rope_theta factor mrope_section mrope_interleaved original_max_position_embeddings low_freq_factor "
    "high_freq_factor attention_factor beta_fast beta_slow short_factor long_factor mscale mscale_all_dim truncate "
    "partial_rotary_factor llama_4_scaling_beta max_position_embeddings"
).split()

_OF_SIGMAS = (
    "num_train_timesteps shift use_dynamic_shifting base_shift max_shift base_image_seq_len max_image_seq_len "
    "shift_terminal time_shift_type use_flow_sigmas flow_shift prediction_type final_sigmas_type"
).split()
"""What the host computes sigmas by."""

_OFF = (
    "invert_sigmas use_karras_sigmas use_exponential_sigmas use_beta_sigmas use_lu_lambdas stochastic_sampling "
    "thresholding rescale_betas_zero_snr"
).split()
"""What the host does not compute: it must be off."""

_OF_SOLVERS = dict.fromkeys(
    "solver_order solver_type solver_p predict_x0 lower_order_final disable_corrector algorithm_type euler_at_final "
    "variance_type lambda_min_clipped".split(),
    "of the scheduler's steps: the host steps, by the solver that the prompt names",
) | dict.fromkeys(
    "beta_start beta_end beta_schedule trained_betas timestep_spacing steps_offset dynamic_thresholding_ratio "
    "sample_max_value".split(),
    "flow sigmas do not depend on it",
)


def check(family: Family) -> None:
    """Fault of class config: a setting of the folder that nothing uses, with its file and its name."""
    diffusers = importlib.import_module("diffusers")
    folder = family.folder
    if (pipeline := getattr(diffusers, folder.class_name, None)) is None:
        raise Fault(
            "config",
            f"model_index.json: _class_name: {folder.class_name!r:.80}; must be a pipeline of diffusers "
            f"{diffusers.__version__}, or give the pipeline itself as --family FILE.py:NAME",
        )
    _check_index(family, pipeline)
    _check_scheduler(family)
    _refuse_unknown("meander.json", family.settings, OF_SETTINGS)
    _check_parts(family)


def _check_parts(family: Family) -> None:
    for part, (library, name) in family.parts.items():
        cls = getattr(importlib.import_module(library), name, None)
        if cls is None or not family.folder.named_class(part):  # said elsewhere
            continue
        config, where = family.folder.read(part, "config.json"), f"{part}/config.json"
        if library != "transformers":
            _refuse_unknown(where, config, {*_parameters(cls), *OF_NETWORKS})
        else:
            _check_encoder(where, config, cls.config_class)


def check_pipeline(family: Pipeline) -> None:
    """The same of a folder that is computed as diffusers loads it: what the pipeline's class does not take."""
    takes, folder = inspect.signature(family.cls.__init__).parameters, family.folder
    _refuse_unknown("meander.json", family.settings, OF_SETTINGS | {"arguments"})
    from .whole import argument

    known = {a["name"]: a for a in family.arguments}
    _refuse_unknown("meander.json: arguments", family.default_arguments(), known)
    for name, value in family.default_arguments().items():
        try:
            argument(known[name], value)
        except ValueError as e:
            raise Fault("config", f"meander.json: arguments: {e}") from None
    optional = {*getattr(family.cls, "_optional_components", ()), "safety_checker", "feature_extractor"}
    for key, takes_it in list(takes.items())[1:]:
        there = folder.named_class(key)
        if takes_it.default is takes_it.empty and takes_it.kind is not takes_it.VAR_KEYWORD and key not in optional:
            if not there and folder.index.get(key) in (None, [None, None]):
                raise Fault("config", f"model_index.json: {key}: none; must be there: {family.cls.__name__} needs it")
        if there and key not in optional and not (folder.path / key).is_dir():
            raise Fault("config", f"model: no {folder.path / key}, which model_index.json names: copy the folder again")
    if "scheduler" in takes and (name := folder.named_class("scheduler")):
        diffusers = importlib.import_module("diffusers")
        if not hasattr(getattr(diffusers, name, None), "set_timesteps"):
            raise Fault(
                "config",
                f"model_index.json: scheduler: {name:.80}; must be a scheduler of diffusers {diffusers.__version__}",
            )
        folder.read(*SCHEDULER)
    if folder.class_name in ACCOUNTED:
        _check_parts(family)
        scheduler = getattr(importlib.import_module("diffusers"), folder.named_class("scheduler"))
        _refuse_unknown("/".join(SCHEDULER), folder.read(*SCHEDULER), _parameters(scheduler))
    if folder.read_optional(*SCHEDULER).get("thresholding"):
        raise Fault(
            "config",
            "scheduler/scheduler_config.json: thresholding: true; must be false: samples are what the network predicts",
        )
    for key, value in folder.index.items():
        if key not in takes and not key.startswith("_") and value not in (None, [None, None]):
            raise Fault(
                "config",
                f"model_index.json: {key}: {value!r:.80}; must be absent: {family.cls.__name__} has no such part",
            )


def _check_index(family: Family, pipeline: type) -> None:
    takes = inspect.signature(pipeline.__init__).parameters  # type: ignore[misc]
    for key, value in family.folder.index.items():
        own = key in (*family.parts, *family.tokenizers, "scheduler", *family.pipeline_settings, *family.index_settings)
        unset = value is None or value == [None, None] or key in takes and value == takes[key].default
        if not own and not unset and not key.startswith("_"):
            raise Fault(
                "config",
                f"model_index.json: {key}: {value!r:.80}; must be absent: {family.folder.class_name} is computed "
                "without it here",
            )


def rounds(folder: Folder) -> bool:
    """Whether the scheduler of a folder gives its network whole timesteps, such as 599 for a sigma of 0.6."""
    config = folder.read_optional(*SCHEDULER)
    name = folder.named_class("scheduler") or str(config.get("_class_name"))
    try:  # what is wrong with it is said elsewhere
        scheduler = getattr(importlib.import_module("diffusers"), name).from_config({**config})
        scheduler.set_timesteps(2, **({"mu": 1.0} if config.get("use_dynamic_shifting") else {}))
    except Exception:
        return False
    return not scheduler.timesteps.is_floating_point()


def _check_scheduler(family: Family) -> None:
    file, config = "/".join(SCHEDULER), family.scheduler_config
    named, own = family.folder.named_class("scheduler"), config.get("_class_name")
    if named and own and named != own:
        raise Fault("config", f"{file}: _class_name: {own!r:.80}; must be {named}, as in model_index.json")
    for key in _OFF:
        if config.get(key):
            raise Fault("config", f"{file}: {key}: {config[key]!r:.80}; must be false: its sigmas are not computed")
    _refuse_unknown(file, config, {*_OF_SIGMAS, *_OFF, *_OF_SOLVERS})
    if rounds(family.folder):
        raise Fault(
            "config", f"{file}: _class_name: {own!r:.80}; must be FlowMatchEulerDiscreteScheduler or another without "
            "whole timesteps, which whole pipelines alone are computed by"
        )  # fmt: skip


def _check_encoder(where: str, config: dict[str, Any], cls: Any) -> None:
    """Checks a configuration of transformers, level by level."""
    known = _fields(cls)
    if where.endswith("vision_config"):
        known.add("rope_parameters")  # written by newer transformers, and read by none: no prompt has images here
    for name, sub in getattr(cls, "sub_configs", {}).items():
        inner = config.get(name)
        if not hasattr(sub, "model_type") or sub.__name__ == "AutoConfig":
            kind = inner.get("model_type") if isinstance(inner, dict) else None
            mapping = importlib.import_module("transformers").CONFIG_MAPPING
            sub = mapping[kind] if kind in mapping else None
        if isinstance(inner, dict) and sub is not None:
            _check_encoder(f"{where}: {name}", inner, sub)
        if name == "text_config" and sub is not None:
            known |= _fields(sub)  # older files have its fields beside it
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        for at, inner in ((name, rope), *(rope.items() if isinstance(rope, dict) else ())):
            nested = isinstance(rope, dict) and any(isinstance(v, dict) for v in rope.values())
            if isinstance(inner, dict) and not (at == name and nested):  # one for each type of layer
                _refuse_unknown(f"{where}: {name}", inner, _ROPE)
    _refuse_unknown(where, config, {*known, *WITHOUT_EFFECT})


def _fields(cls: Any) -> set[str]:
    return {*_parameters(cls), *cls().to_dict(), *getattr(cls, "attribute_map", {})}


def _parameters(cls: type) -> set[str]:
    return {n for c in cls.__mro__ if "__init__" in vars(c) for n in inspect.signature(vars(c)["__init__"]).parameters}


def _refuse_unknown(where: str, config: dict[str, Any], known: Any) -> None:
    for key, value in config.items():
        if key not in known and not key.startswith("_") and value is not None:
            raise Fault(
                "config",
                f"{where}: {key}: {value!r:.80}; no setting that is known: remove it, or try the newest diffusers and "
                "transformers",
            )
