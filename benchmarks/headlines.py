"""What each benchmark measures, against what, and which column of its rows is the figure that its claim is about."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Headline:
    """One line for a reader. ``figures``: the column that each kind of claim is about, by what stands before its
    ``claim`` column ("" for the first); a ratio below 1 is less time, memory or work than ``against``. ``rows``: the
    columns that name a row."""

    what: str
    against: str
    claim: str
    figures: dict[str, str]
    rows: tuple[str, ...] = ("network",)
    others: dict[str, str] = field(default_factory=dict)  # further claims in words, by the same key


RATIO = {"": "ratio"}
HEADLINES = {
    "memory_over_a_step": Headline(
        "Memory of a training step", "plain PyTorch", "at most 0.2 times the bytes, same bits",
        {"": "of plain's peak"}, ("network", "side"),
    ),
    "everything_fits": Headline(
        "Step time when everything fits", "plain PyTorch", "at most 1.03 times", RATIO, ("network", "with"),
    ),
    "equal_peak": Headline(
        "Step time at equal peak memory", "the best `checkpoint_sequential`", "at most 1.00 times", RATIO,
        ("network", "peak allowed MiB"),
    ),
    "beside_ramtorch": Headline(
        "Step time, parameters in RAM", "RamTorch, with no more memory", "at most 1.00 times", RATIO,
        ("network", "RamTorch's way"),
    ),
    "beside_deepspeed": Headline(
        "Step time, parameters in RAM", "DeepSpeed ZeRO-3 with CPU offload, with no more memory", "at most 1.00 times",
        RATIO, ("network", "its optimizer"),
    ),
    "beside_trainer": Headline(
        "Step time of fine-tuning", "Hugging Face's Trainer with gradient checkpointing, with no more memory",
        "at most 1.00 times", RATIO, ("network", "blocks live in", "loss"),
    ),
    "beside_compiled": Headline(
        "Step time of a Program at equal peak memory", "`torch.compile` with `activation_memory_budget`",
        "bits of plain PyTorch, with no more memory (time is not claimed)", RATIO,
        ("network", "activation_memory_budget"),
    ),
    "beside_schedules": Headline(
        "Cost of a plan, and time to make it", "checkpoint_schedules and pyrevolve", "never dearer",
        {"": "cost", "planning time ": "time over its"}, ("of", "its schedule", "steps", "slots"),
        {"planning time ": "never slower to plan"},
    ),
    "from_disk": Headline(
        "Step time, parameters and optimizer state on disk", "the slower of plain PyTorch and the link",
        "at most 1.25 times", {"": "ratio", "moved ": "moved over least"}, ("network", "budget", "update"),
        {"moved ": "moves at most 1.05 times the least bytes"},
    ),
    "accumulate": Headline(
        "Step time of eight micro-batches, parameters on disk", "one call and one backward after the other",
        "at most 0.5 times", RATIO, ("network", "budget"),
    ),
    "forward_only": Headline(
        "Evaluation, parameters on disk", "the slower of plain PyTorch and the link", "at most 1.10 times", RATIO,
        ("network", "budget"),
    ),
    "random_lengths": Headline(
        "Batches of random lengths, planned as they come", "all plans made before", "at most 1.10 times",
        {"": "ratio", "first ": "first step ms"}, ("network", "with"),
        {"first ": "a first step costs at most three plain steps and one read of the weights"},
    ),
    "kept_attention": Headline(
        "Step time with attention results kept", "the same plan without", "at most 1.00 times", RATIO,
        ("network", "budget MiB"),
    ),
    "offload_and_recompute": Headline(
        "Step time in a quarter and a sixth of the tape's memory", "plain PyTorch",
        "at most 1.20 times, and a third of recomputation's overhead removed", {"": "ratio"},
        ("network", "part of the tape", "planner"),
    ),
    "million_layers": Headline(
        "Networks of up to a million layers under a hard memory limit", "plain PyTorch, which fails",
        "time and memory per layer stay level", {"": "seconds per layer, of the shallowest's"}, ("network", "layers"),
    ),
    "supernets": Headline(
        "Depth of a ResNet in equal memory", "plain PyTorch", "at least 3.24 times as deep (SuperNeurons)", RATIO,
        ("network", "layers", "technique"),
    ),
    "loop_long": Headline(
        "Ten million steps of a loop within 256 MiB", "a hundred thousand steps", "at most 1.10 times per step",
        {"": "ratio to the shorter"}, ("steps",),
    ),
    "loop_beside": Headline(
        "Time per step of a long loop", "equinox and pyrevolve, 40 restart checkpoints each",
        "at most 1.0 (equinox, of equal work) and 2.5 times (pyrevolve)", RATIO, ("problem", "step", "beside"),
    ),
    "loop_overhead": Headline(
        "Time per step of a loop", "a bare loop and `torch.utils.checkpoint`", "adds at most 5 microseconds", RATIO,
        ("what", "width"),
    ),
    "async_disk": Headline(
        "Time per step, states to disk meanwhile", "Revolve at the same slots", "at most 1.05 times the better",
        {"": "over the better of Revolve and offload"}, ("contender", "how"),
    ),
    "program_speed": Headline(
        "Time of a program when everything fits", "plain PyTorch", "at most 1.1 times the processor time", RATIO,
        ("budget", "width"),
    ),
    "program_networks": Headline(
        "Networks as programs in a quarter of the tape's memory", "plain PyTorch with all of it", "at most 1.25 times",
        {"": "ratio", "over it ": "over checkpoint_sequential"}, ("network", "way"),
        {"over it ": "at most 1.00 times `checkpoint_sequential`"},
    ),
    "program_long": Headline(
        "Programs of up to a million operations", "the formulas", "records of at most 400 bytes an operation", RATIO,
        ("what",),
    ),
    "least_again": Headline(
        "Work that plans of programs run again", "the least that any plan must", "at most 1.3 times",
        {"": "over the least"}, ("network", "part of the tape"),
    ),
    "planning_speed": Headline(
        "Time and memory of planning", "limits", "under 0.1 to 20 seconds by size",
        {"": "seconds", "MB ": "MB", "bound ": "over the bound"}, ("planner", "stages", "what"),
        {"MB ": "under 50 MB", "bound ": "within 5% of a lower bound"},
    ),
    "ablation": Headline(
        "The fastest plan found without one of the planners", "the fastest found with all",
        "at most 1.01 times without those that are not tried by default", RATIO, ("left out", "asked"),
    ),
    "first_seconds": Headline(
        "Time until the command answers", "`python -c pass`, and `import torch`",
        "help in at most 25 times, `import tapestream` in at most 1.10 times", {"": "seconds"}, ("what",),
    ),
    "against": Headline(
        "Processor time of tapestream's steps", "an earlier revision of it", "", RATIO, ("benchmark", "row"),
    ),
    "save_speed": Headline(
        "Saving a streamed model", "moving as many bytes", "at most 1.2 times", RATIO, ("network", "home"),
    ),
    "planned_seconds": Headline(
        "Steps planned from shapes alone", "steps measured in plain PyTorch", "within a factor of 2",
        {"": "planned / measured"}, ("network",),
    ),
    "plans_kept": Headline(
        "Peaks of steps", "their plans, at drawn budgets", "0.5% off in the median, 2% at most, none above the budget",
        {"": "off in the median"}, ("front end",),
    ),
    "three_tiers": Headline(
        "Step times as RAM and the card grow", "nothing: simulated", "what finds no room in RAM costs time, no more",
        {"": "s per step"}, ("model", "card GiB", "RAM GiB"),
    ),
    "streaming_on_paper": Headline(
        "Streamed steps with updates in RAM", "what binds them, simulated",
        "1.05 to 1.20 times, by tokens and RAM's speed",
        {"": "over bound"}, ("model", "card GiB", "tokens", "update", "parameters/s in RAM"),
    ),
    "ranks_scaling": Headline(
        "One model on many GPUs", "nothing: simulated", "", {}, ("model", "GPUs", "between machines", "divided among"),
    ),
    "ranks_gloo": Headline(
        "Step time of several processes", "`DistributedDataParallel`, FSDP2 where divided, on gloo",
        "in memory at most 1.00 times", RATIO,
        ("ranks", "with"),
    ),
    "ranks_deepspeed": Headline(
        "Step time of several processes that divide a model", "DeepSpeed ZeRO-3 with CPU offload, with no more memory",
        "at most 1.00 times", RATIO, ("ranks", "its optimizer", "with"),
    ),
    "what_to_expect": Headline("Step times on GPUs", "nothing: simulated", "", {}, ("model",)),
}  # fmt: skip
"""By the name of the result, in the order in which they are shown."""

FIRST = ("memory_over_a_step", "beside_deepspeed", "beside_trainer", "million_layers", "loop_long")
"""Those that README.md shows."""
