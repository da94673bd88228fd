"""What can be exported to what: formats, the forms of models that they hold, number formats, tolerances, serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..common.errors import ExportError, missing_extra

TOLERANCE: Mapping[str, float] = {
    "float32": 2.0**-13,  # 2^-23 for a number; sums in another order lose up to some hundred of them
    "float16": 2.0**-7,  # 2^-11 for each weight, 16 times that for what is summed from them
    "bfloat16": 2.0**-4,  # 2^-8 for each weight
    "int8": 2.0**-3,  # 2^-7 for each weight and each activation
    "q8_0": 2.0**-4,  # 2^-8 for each weight, the activations are whole
    "q4_0": 2.0**-1,  # 2^-4 for each weight, up to 2^-3 at one end: here it is the metric that decides
}
"""Largest difference that an artifact may have, as a share of the largest number that the model gives."""

SLACK: Mapping[str, float] = {
    "float32": 0.001, "float16": 0.005, "bfloat16": 0.02, "int8": 0.03, "q8_0": 0.01, "q4_0": 0.05,
}  # fmt: skip
"""How much worse a metric may be: of metrics above 1 as a share of it."""


@dataclass(frozen=True)
class Target:
    """A format for models of one form.

    Args:
        format: its name on the command line.
        form: of the model, as `common.exportable` lists them.
        module: in `targets`.
        dtypes: number formats, the default first.
        runtime: what serves it.
        serve: command or lines of Python that serve it; `{path}` is the artifact.
        needs: packages that have to be installed.
        extra: what brings them.
    """

    format: str
    form: str
    module: str
    dtypes: tuple[str, ...]
    runtime: str
    serve: str
    needs: tuple[str, ...] = field(default=())
    extra: str = "export"

    def load(self) -> Any:
        """The module, once all that it needs is installed.

        Raises:
            LuthierError: a package is missing; it names the extra that brings it.
        """
        for package in self.needs:
            if find_spec(package) is None:
                raise missing_extra(package, self.extra)
        return import_module(f".targets.{self.module}", __package__)


FLOATS = ("float32", "bfloat16", "float16")

_CAUSAL = 'AutoModelForCausalLM.from_pretrained("{path}")'
_ENCODE = 'model = {name}("{{path}}")\nmodel.encode_query(queries); model.encode_document(documents)'
_ADAPTER = "PeftModel.from_pretrained(base, '{path}')"
_ORT = 'session = onnxruntime.InferenceSession("{path}/model.onnx")'
_ONNX = ("onnxscript", "onnxruntime")
_SHERPA = """sherpa_onnx.OfflineRecognizer.{name}, tokens="{{path}}/tokens.txt")"""

TARGETS: tuple[Target, ...] = (
    Target("merged", "causal_lm", "merged", FLOATS, "transformers, vLLM, SGLang",
           "vllm serve {path}\npython -m sglang.launch_server --model-path {path}"),
    Target("merged", "speech_seq2seq", "merged", FLOATS, "transformers, vLLM", "vllm serve {path}"),
    Target("merged", "ctc", "merged", FLOATS, "transformers", 'AutoModelForCTC.from_pretrained("{path}")'),
    Target("merged", "embedding", "merged", FLOATS, "sentence-transformers",
           _ENCODE.format(name="SentenceTransformer")),
    Target("merged", "sparse", "merged", FLOATS, "sentence-transformers", _ENCODE.format(name="SparseEncoder")),
    Target("merged", "multi_vector", "merged", FLOATS, "sentence-transformers",
           _ENCODE.format(name="MultiVectorEncoder")),
    Target("merged", "reranker", "merged", FLOATS, "sentence-transformers",
           'CrossEncoder("{path}").predict([(query, document), ...])'),
    Target("merged", "text_to_image", "merged", FLOATS, "diffusers", 'DiffusionPipeline.from_pretrained("{path}")'),
    Target("diffusers", "text_to_image", "adapter", ("float32",), "diffusers", 'pipe.load_lora_weights("{path}")'),
    Target("kohya", "text_to_image", "kohya", ("float32",), "ComfyUI, kohya, diffusers",
           'pipe.load_lora_weights("{path}", weight_name="adapter.safetensors")'),
    Target("adapter", "causal_lm", "adapter", ("float32",), "PEFT, vLLM",
           "vllm serve BASE --enable-lora --lora-modules tuned={path}"),
    Target("adapter", "speech_seq2seq", "adapter", ("float32",), "PEFT", _ADAPTER),
    Target("adapter", "ctc", "adapter", ("float32",), "PEFT", _ADAPTER),
    Target("adapter", "embedding", "adapter", ("float32",), "sentence-transformers",
           'SentenceTransformer("{path}")'),
    Target("adapter", "reranker", "adapter", ("float32",), "sentence-transformers", 'CrossEncoder("{path}")'),
    Target("onnx", "embedding", "onnx_texts", ("float32", "int8"), "onnxruntime", _ORT, _ONNX),
    Target("onnx", "sparse", "onnx_texts", ("float32", "int8"), "onnxruntime", _ORT, _ONNX),
    Target("onnx", "reranker", "onnx_texts", ("float32", "int8"), "onnxruntime", _ORT, _ONNX),
    Target("onnx", "ctc", "onnx_ctc", ("float32",), "onnxruntime, sherpa-onnx",
           _SHERPA.format(name='from_omnilingual_asr_ctc("{path}/model.onnx"'), _ONNX),
    Target("onnx", "speech_seq2seq", "onnx_whisper", ("float32", "int8"), "onnxruntime, sherpa-onnx",
           _SHERPA.format(name='from_whisper("{path}/encoder.onnx", "{path}/decoder.onnx"'), _ONNX),
    Target("onnx", "paraformer", "onnx_paraformer", ("float32",), "onnxruntime", _ORT, _ONNX),
    Target("onnx", "text_to_image", "onnx_unet", ("float32",), "onnxruntime",
           'session = onnxruntime.InferenceSession("{path}/unet/model.onnx")', _ONNX),
    Target("onnx", "causal_lm", "onnx_causal", ("float32", "int8"), "onnxruntime", _ORT, _ONNX),
    *(Target("openvino", form, "openvino_texts", ("float32", "float16"), "OpenVINO",
             'openvino.Core().compile_model("{path}/openvino_model.xml", "CPU")', (*_ONNX, "openvino"))
      for form in ("embedding", "sparse", "reranker")),
    Target("ctranslate2", "speech_seq2seq", "ctranslate2", ("float32", "float16", "int8"), "faster-whisper",
           'WhisperModel("{path}").transcribe("speech.wav")', ("ctranslate2",)),
    Target("funasr", "paraformer", "merged", ("float32",), "FunASR",
           'funasr.AutoModel(model="{path}").generate(input="speech.wav")'),
    Target("nemo", "nemo", "merged", ("float32",), "NeMo",
           'ASRModel.restore_from("{path}/model.nemo").transcribe(["speech.wav"])'),
    Target("gguf", "causal_lm", "gguf", ("float16", "float32", "q8_0", "q4_0"), "llama.cpp",
           "llama-server -m {path}/model.gguf", ("gguf",)),
    Target("torchao", "causal_lm", "torchao", ("int8",), "transformers", _CAUSAL, ("torchao",), "torchao"),
)  # fmt: skip


def find(format: str, form: str) -> Target:
    """The target of a format for models of a form.

    Raises:
        ExportError: there is none.
    """
    known = [target for target in TARGETS if target.form == form]
    for target in known:
        if target.format == format:
            return target
    raise ExportError(
        "models of this kind have no such format",
        where="--to",
        given=format,
        expected=", ".join(target.format for target in known) or "none yet",
    )


def chosen(target: Target, asked: str | None, trained: str) -> str:
    """The number format: the one asked for, else that of the training, else the format's first.

    Raises:
        ExportError: the format does not have it.
    """
    if asked is None:
        return "bfloat16" if trained == "bf16-true" and "bfloat16" in target.dtypes else target.dtypes[0]
    if asked not in target.dtypes:
        raise ExportError(
            "the format has no such numbers", where="--dtype", given=asked, expected=", ".join(target.dtypes)
        )
    return asked


def rows() -> list[str]:
    """The table of what can be exported to what, as the README has it: one line for each format."""
    found: dict[str, list[Target]] = {}
    for target in TARGETS:
        found.setdefault(target.format, []).append(target)
    lines = []
    for name, targets in found.items():
        forms = ", ".join(target.form for target in targets)
        numbers = ", ".join(dict.fromkeys(number for target in targets for number in target.dtypes))
        runtimes = ", ".join(dict.fromkeys(name for target in targets for name in target.runtime.split(", ")))
        lines.append(f"| `--to {name}` | {forms} | {numbers} | {runtimes} |")
    return lines
