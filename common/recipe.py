"""The recipe: one file describes a run.

Each task kind narrows the sections with its own fields (`class Config(Recipe)` in the folder of the kind); this file
holds what all of them share.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def absolute_if_local(value: str) -> str:
    """A path that exists becomes absolute, so that the saved recipe works from any folder; a hub name stays."""
    return str(Path(value).expanduser().resolve()) if Path(value).expanduser().exists() else value


LocalOrHub = Annotated[str, AfterValidator(absolute_if_local)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, finite numbers; a field's docstring is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class TaskSection(Section):
    kind: str
    """What is trained, as `modality.name`, such as `asr.whisper`."""


class LoraSection(Section):
    """An adapter of PEFT's LoRA family."""

    rank: int = Field(16, ge=1)
    """Rank of the update matrices."""
    alpha: float = Field(32, gt=0)
    """Scale: the update is multiplied by alpha / rank (alpha / sqrt(rank) with `rslora`)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability on the adapter's input."""
    target_modules: str | tuple[str, ...] = ("q_proj", "v_proj")
    """Names of the layers that get an adapter, a regular expression, or `all-linear`."""
    dora: bool = False
    """Weight-decomposed adapter (DoRA, arXiv:2402.09353)."""
    rslora: bool = False
    """Rank-stabilised scale (rsLoRA, arXiv:2312.03732)."""
    init: Literal["default", "gaussian", "pissa", "olora", "orthogonal"] = "default"
    """Start values of the adapter, by PEFT's names; `default` starts as the base model exactly."""
    modules_to_save: tuple[str, ...] = ()
    """Names of further layers that are trained whole and saved with the adapter."""


class ModelSection(Section):
    path: LocalOrHub
    """Directory of the model in its own ecosystem's format, or a hub name."""
    lora: LoraSection | None = None
    """Train an adapter and freeze the rest; absent: train the model itself."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off unless you have read that code."""


class Source(Section):
    """One data set."""

    path: LocalOrHub
    """File or folder, or the name of a hub data set."""
    split: str | None = None
    """Split of a hub data set, such as `train`."""
    weight: float = Field(1.0, gt=0)
    """Share of the rows in an epoch: 1 is each row once, 0.5 another half each epoch, 2 each row twice. In a
    stream (`data.streaming`), rows read of this source for each row of one with the weight 1."""
    name: str | None = None
    """Name in reports and in the slice `source`; default: the file's name."""

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem


def listed_sources(value: Any) -> Any:
    """`A.jsonl`, `{path: A.jsonl, weight: 2}` or a list of either."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple({"path": item} if isinstance(item, str | Path) else item for item in items)


Sources = Annotated[tuple[Source, ...], BeforeValidator(listed_sources)]


class BatchSection(Section):
    """Bounds of one batch on one device; a modality adds the bound in its own unit."""

    examples: int = Field(8, ge=1)
    """Most examples in a batch."""
    bucket_batches: int = Field(100, ge=0)
    """Examples are sorted by length within this many batches, so that a batch holds similar lengths; 0: no sorting."""

    @property
    def packed(self) -> bool:
        """Whether each batch is filled with the examples that fit best."""
        return False

    def budget(self) -> float | None:
        """Most cost of a batch, in the modality's unit; None: no bound."""
        return None


class DataSection(Section):
    train: Sources = Field(min_length=1)
    """Training data: a path, `{path, weight, name}` or a list of them."""
    validation: Sources = ()
    """Data for the evaluation during training, in the same forms."""
    regression: Sources = ()
    """Data of what the model is not to forget, evaluated along with `validation`, as the metrics `regression/...`."""
    test: Sources = ()
    """Data for `luthier evaluate CHECKPOINT test`, in the same forms."""
    on_bad: Literal["raise", "skip"] = "skip"
    """What to do with an example that can't be used: stop at once, or leave it out, named and counted."""
    max_bad: float = Field(0.05, ge=0, le=1)
    """With `skip`: the largest share of unusable examples, as a fraction; above it the run is refused."""
    batch: BatchSection = BatchSection()
    """Bounds of one batch on one device."""
    workers: int | None = Field(None, ge=0)
    """Processes that prepare batches; default: none with up to 2 cores, else half of the cores, 8 at most."""
    streaming: bool = False
    """Read `train` as it goes, for data too large for memory: rows of all sources mixed by weight, each source over and
    over, for `train.steps`. The other sets are read whole."""
    buffer: int = Field(10_000, ge=1)
    """With `streaming`: examples that are read, shuffled and planned together; two such windows are in memory."""

    @model_validator(mode="after")
    def _beside_a_validation(self) -> Self:
        if self.regression and not self.validation:
            raise ValueError("regression is evaluated along with validation; give that too")
        return self


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return value


class GroupSection(Section):
    match: Annotated[str, AfterValidator(_pattern)]
    """Regular expression, searched in the parameter's name."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of this group; default: the common one."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay of this group; default: the common one."""


Decay = Annotated[float, Field(ge=0, lt=1)]


Quantization = Literal["none", "nf4"]
"""How a frozen base is kept: as it is, or as 4-bit NormalFloat (QLoRA, arXiv:2305.14314)."""


class OptimSection(Section):
    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "sgd", "adafactor"] = "adamw"
    """Optimizer, by torch's names; AdamW also with its moments in 8 bits (bitsandbytes, arXiv:2110.02861), and those in
    paged memory, which a CUDA device moves to the host when it is short of memory."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay, decoupled from the gradient (but for sgd); never applied to biases and norms."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of Adam's two moments."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "linear"
    """Learning rate after the warm-up: constant, down to `final` linearly or along a cosine, inverse square root, or
    warmup-stable-decay (constant, then linear over the last fifth)."""
    warmup: float = Field(0.1, ge=0)
    """Linear warm-up: a share of all steps if below 1, else a number of optimizer steps."""
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Largest 2-norm of the whole gradient; null: no clipping."""
    groups: tuple[GroupSection, ...] = ()
    """Other rates for some parameters; the first group whose `match` is found in the name counts."""


class DebugSection(Section):
    """What is written of the inside of a training to `OUTPUT/debug.csv`; it changes nothing of the training."""

    every: int = Field(100, ge=1)
    """Optimizer steps between two looks."""
    gradients: bool = True
    """Of each trained parameter: norm of the gradient before clipping, shares that are zero and not finite."""
    activations: bool = True
    """Of each layer's output on the first rank: mean, standard deviation, largest absolute value, share not finite."""
    optimizer: bool = True
    """Of each trained parameter: its norm, the size of its update relative to it, and norms of its optimizer state.
    The looks need room for a copy of the trained parameters in the host's memory."""
    match: Annotated[str, AfterValidator(_pattern)] = ""
    """Regular expression, searched in the names of modules and parameters; default: all."""


class TrainSection(Section):
    epochs: float | None = Field(None, gt=0)
    """Passes over the data; parts of one allowed. Give this or `steps`; default: 3 epochs."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps."""
    accumulate: int = Field(1, ge=1)
    """Batches per device in one optimizer step."""
    seed: int = Field(0, ge=0)
    """Seed of weights, order, dropout and augmentation."""
    strategy: Literal[
        "auto", "ddp", "fsdp2", "fsdp2+tp", "deepspeed_zero1", "deepspeed_zero1_offload", "deepspeed_zero2",
        "deepspeed_zero2_offload", "deepspeed_zero3", "deepspeed_zero3_offload",
    ] = "auto"  # fmt: skip
    """How devices share the work: `ddp` copies the model, `fsdp2` cuts it over the devices, `fsdp2+tp` also cuts each
    layer, DeepSpeed's ZeRO cuts the optimizer's state (1), the gradients too (2), the weights too (3)."""
    tensor_parallel: int | None = Field(None, ge=1)
    """Devices that share each layer, with `fsdp2+tp`."""
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    """Kind of device."""
    devices: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Devices on each node; `auto`: all accelerators, or one process on CPU."""
    nodes: int = Field(1, ge=1)
    """Number of machines."""
    precision: Literal["32", "bf16-mixed", "bf16-true", "16-mixed"] = "32"
    """Number format of the computation."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more work."""
    compile: bool = False
    """Compile the model with torch.compile."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch in a process; default: torch's own choice."""
    log_every: int = Field(10, ge=1)
    """Optimizer steps between two logged points."""
    timeout: float = Field(1800, gt=0)
    """Seconds without progress after which a run of several processes ends, naming the one that hangs."""
    requeue: bool = False
    """In a SLURM job: put the job back into the queue when SIGTERM or SIGUSR1 has stopped the run and it is saved.
    `scancel` sends SIGTERM too."""
    max_skipped: int = Field(10, ge=0)
    """Most optimizer steps in a row that may be left out, for a non-finite loss or gradient or as spikes, before the
    run stops."""
    spike_factor: float | None = Field(None, gt=1)
    """A step whose mean loss is above this many times the median of the last 50 is a loss spike and recorded in
    `OUTPUT/skipped.jsonl`; null: spikes are not looked for."""
    on_spike: Literal["record", "skip"] = "record"
    """What else to do with a loss spike: nothing, or leave the step's update out."""
    debug: DebugSection | None = None
    """Watch gradients, activations and optimizer state; absent: don't."""
    fresh: bool = False
    """Start over in a new folder `output-2`, `output-3`, ... instead of resuming from `output`."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give either epochs or steps, not both")
        return self

    @model_validator(mode="after")
    def _seen_inside(self) -> Self:
        if self.compile and self.debug is not None and self.debug.activations:
            raise ValueError("debug.activations can't look into a compiled model; set it or compile to false")
        return self


class EvaluateSection(Section):
    every: Annotated[int, Field(ge=1)] | Literal["epoch", "never"] = "epoch"
    """Evaluate after this many optimizer steps, or after each `epoch`; always at the end."""
    at_start: bool = False
    """Evaluate once before the first step too."""
    batch: int = Field(8, ge=1)
    """Examples in an evaluation batch."""
    limit: int | None = Field(None, ge=1)
    """Most examples used during training, evenly spread over the set; default: all."""
    samples: int = Field(8, ge=0)
    """Predictions kept for reading at each evaluation."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations without a better `checkpoint.best`; default: never."""


class CheckpointSection(Section):
    every: int | None = Field(500, ge=1)
    """Save after this many optimizer steps; also after each evaluation, and at the end."""
    best: str | None = None
    """Metric that decides which checkpoint is best; default: the task's first metric."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept besides the best one; never fewer than 2 in all."""
    asynchronous: bool = False
    """Seal a checkpoint (hashes, forcing it to the disk, renaming) while the training goes on. It counts only once it
    is sealed, so a kill loses it; the one before is still there."""


class TrackSection(Section):
    loggers: tuple[Literal["csv", "tensorboard", "mlflow", "wandb", "swanlab", "trackio"], ...] = ("csv",)
    """Where curves, samples and what the run is made of go; csv is always written. A resumed run goes on with its
    record there. Keys and addresses of accounts are taken from the trackers' own settings."""
    project: str = "luthier"
    """Project (MLflow: experiment) that the run belongs to there."""
    name: str | None = None
    """Name of the run there; default: the last two parts of the output's path."""
    uri: str | None = None
    """Address of the MLflow server; default: the variable MLFLOW_TRACKING_URI, else a database in the run's folder."""
    estimate: str | None = None
    """File of `luthier estimate --json`: the speed of the first steps replaces the one that is assumed there, and a run
    that is over 2 times slower or faster says so."""


class Recipe(Section):
    """A whole run. Each kind has its own subclass `Config` with narrowed sections."""

    task: TaskSection
    """What is trained."""
    model: ModelSection
    """What it starts from, and which parts of it are trained."""
    data: DataSection
    """What it is trained and evaluated on."""
    optim: OptimSection = OptimSection()
    """How weights are updated."""
    train: TrainSection = TrainSection()
    """How long, where and in which precision it runs."""
    evaluate: EvaluateSection = EvaluateSection()
    """Evaluation during training and by `luthier evaluate`."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is saved, and what is kept."""
    track: TrackSection = TrackSection()
    """Where curves go."""
    output: str = Field(min_length=1)
    """Folder of the run; made if absent, never overwritten."""

    @model_validator(mode="after")
    def _stream_has_no_end(self) -> Self:
        if self.data.streaming and self.train.steps is None:
            raise ValueError("data.streaming has no epochs; give train.steps")
        if self.data.streaming and self.data.validation and self.evaluate.every == "epoch":
            raise ValueError("data.streaming has no epochs; give evaluate.every as a number of steps, or never")
        return self

    def dump(self) -> str:
        """The resolved recipe as YAML; reading it again gives an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=False), sort_keys=False, allow_unicode=True)
