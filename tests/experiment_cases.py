"""The four experiments at their smallest, and for every config key another value that must act."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


def changes(text: str) -> dict[str, tuple[str, ...]]:
    """Another value of each key, and the words that both runs need for it to matter: after `|`."""
    found = {}
    for line in text.split("\n"):
        own, _, words = line.partition("|")
        for change in own.split():
            key, _, value = change.partition("=")
            shared = (SETS.get(word, (word,)) for word in words.split())
            found[key] = (value, *(word for some in shared for word in some))
    return found


@dataclass(frozen=True)
class Case:
    """One experiment: its small run, and what each of its config keys is changed to."""

    name: str
    small: list[str]
    changes: dict[str, tuple[str, ...]]
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Keys that act where a short run does not show it, and the test that does."""
    refused: tuple[str, ...] = ()
    """Keys of a single value; what another one says stands in the page of refusals."""
    alone: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys whose words only go together, and the words that the other run has in their place."""
    cache: tuple[str, ...] = ()
    """Words with which the run puts something into data.cache_dir."""
    imports: frozenset[str] = frozenset()
    """Libraries that --help must not import."""

    @property
    def config(self) -> Path:
        return ROOT / self.name / "configs/laptop.yaml"

    def all_changes(self) -> dict[str, tuple[str, ...]]:
        return {**SHARED, **self.changes}


BORDELON = (
    "prescription.alignment=null prescription.base_width=null model.mlp_ratio=1 "
    "prescription.parameterization=bordelon prescription.alpha_attention=1.0 "
    "prescription.alpha_depth=1.0 prescription.beta0=4.0 prescription.gamma0=0.25"
).split()
MUON = (
    "optimizer.name=muon prescription.parameterization=spectral prescription.alignment=null"
).split()
SHARDS = "data.source=shards data.path={files}/shards model.classes=2".split()
FILES = (
    "data.source=cifar5m data.path={files}/one data.train_images=12 training.steps=1 "
    "schedule.warmup_steps=0"
).split()
LOUD = "optimizer.lr=3.0 optimizer.weight_decay=0 training.divergence_factor=1000.0".split()
SETS = {"SGD": ["optimizer.name=sgd"], "BORDELON": BORDELON, "MUON": MUON}
SETS |= {"FILES": FILES, "LOUD": LOUD}

SHARED = changes("""
seed=7 optimizer.name=sgd optimizer.lr=0.02 optimizer.beta1=0.5 optimizer.beta2=0.5
optimizer.eps=0.1
optimizer.momentum=0.5 | SGD
optimizer.weight_decay=0.2 | optimizer.decay_mode=global
optimizer.decay_mode=independent | optimizer.weight_decay=0.1 optimizer.decay_mode=global
optimizer.clip_norm=1e-5 | SGD
schedule.name=constant schedule.warmup_steps=1 schedule.steps=9 schedule.min_lr=0.001
schedule.floor=0.5 | schedule.min_lr=0.0
training.steps=5 training.batch_size=12 training.log_every=3 training.eval_every=2
training.eval_per_octave=1 training.eval_samples=5 training.precision=bf16
training.divergence_factor=1.0001 | LOUD
training.gradient_scale=true training.skip_overflow=true training.probe_every=2
training.probe_samples=1 | training.probe_every=2
""")
OBSERVED = """
training.observe_every=2
training.observe_samples=1 | training.observe_every=2
"""
ATAN2 = "optimizer.atan2_lambda=1.0 | optimizer.name=adam_atan2\n"
STRATEGIES = """
prescription.strategy=hybrid
prescription.s=0.25 | prescription.strategy=meta_principled prescription.s=0.75
prescription.mlp_factor=keep | prescription.strategy=neural_tangent
"""
# These change how a run is computed, not its result; test_experiments looks at how.
HOW = (
    "training.micro_batch_size training.eval_batch_size training.compile "
    "training.cuda_graphs training.data_workers training.trackers data.cache_dir"
).split()
NO_RATES = "the paper has no rates for this optimiser: the page of refusals"
LOOP = (
    "training.steps=6 training.batch_size=8 training.log_every=2 training.eval_every=0 "
    "training.eval_samples=10 training.eval_batch_size=8 schedule.warmup_steps=2 "
    "checkpoint.minutes=null "
)

# ------------------------------------------------------------------------------------------------

NANOLM = Case(
    "nanolm_c4",
    (
        LOOP + "model.width=16 model.head_dim=4 model.layers=1 model.context=8 "
        "prescription.base_width=32 data.tokenizer_vocab_size=80 data.source=local "
        "data.validation_fraction=0.2 data.path={files}/one"
    ).split(),
    changes(
        OBSERVED
        + ATAN2
        + """
model.width=32 model.layers=2 model.head_dim=8 model.mlp_ratio=2 model.norms=false model.context=6
model.vocab_size=100
model.heads=8 | model.width=null model.heads=4
model.tied=true | prescription.parameterization=mup
optimizer.min_dim_factored=4 | optimizer.name=adafactor
prescription.parameterization=mup prescription.alignment=full prescription.gamma_embedding=2.0
prescription.gamma_hidden=2.0 prescription.gamma_readout=2.0 prescription.embedding_exponent=1.0
prescription.embedding_std=0.5
prescription.base_width=64 | prescription.alignment=full
prescription.gamma_units=effective | prescription.parameterization=ntk
prescription.decay_exponent=-1.0 | optimizer.weight_decay=0.1 optimizer.decay_mode=independent
prescription.convention=match_rms prescription.rate_exponent=0.5 prescription.adam_factor=2.0 | MUON
prescription.eps_per_layer=true | optimizer.eps=0.1
prescription.qk_exponent=-2.0 | model.head_dim=8 prescription.embedding_std=1.0
prescription.alpha_attention=0.5 prescription.beta0=2.0 prescription.gamma0=2.0 | BORDELON
prescription.alpha_depth=0.5 | BORDELON model.layers=2
prescription.base_depth=4 | prescription.alpha_depth=1.0 prescription.base_depth=2
data.source=embedded | data.path=null data.tokenizer={files}/tokenizer.model
data.path={files}/two data.tokenizer_vocab_size=70 data.validation_fraction=0.4
data.evaluation=truncate data.max_train_tokens=300
data.text_key=body | data.path={files}/rows.jsonl
data.tokenizer={files}/tokenizer.model | data.tokenizer_vocab_size=75
data.max_validation_tokens=40 | training.eval_samples=100
"""
    ),
    alone={"data.source": ("data.tokenizer={files}/tokenizer.model",)},
    cache=("data.path={files}/one",),
    imports=frozenset({"datasets", "sentencepiece"}),
)

BART = Case(
    "bart_span_denoise",
    (
        LOOP + "model.width=16 model.head_dim=8 model.layers=1 data.source=text "
        "data.tokens_per_sample=24 data.trained_vocab_size=300 data.validation_fraction=0.2 "
        "data.path={files}/one"
    ).split(),
    changes(
        STRATEGIES
        + """
prescription.c_we=0.25 prescription.rescale=true training.gradient_scale=false
training.skip_overflow=false
model.width=32 model.layers=2 model.head_dim=4 model.mlp_ratio=2 model.vocab_size=400
model.positions=fairseq model.dropout=0.5 model.attention_dropout=0.5
data.source=embedded | data.path=null data.max_train_tokens=2000
data.path={files}/two data.trained_vocab_size=320 data.tokens_per_sample=16
data.text_key=body | data.path={files}/rows.jsonl
data.validation_fraction=0.4 data.max_train_tokens=600 data.max_validation_tokens=100
data.noise.unit=token data.noise.fraction=0.5 data.noise.fraction_mode=exact
data.noise.poisson_lambda=1.5 data.noise.permute=false
"""
    ),
    elsewhere={
        "optimizer.atan2_lambda": NO_RATES,
        "optimizer.min_dim_factored": NO_RATES,
        **dict.fromkeys(("data.bpe_encoder", "data.bpe_vocab", "data.bpe_dictionary"), "test_data"),
    },
    alone={"data.source": ()},
    cache=("data.path={files}/one",),
    imports=frozenset({"datasets", "fairseq"}),
)

IMAGENET = Case(
    "vit_imagenet",
    (
        LOOP + "model.width=16 model.head_dim=8 model.layers=1 model.image_size=8 "
        "data.eval_resize=8 data.augmentation.mix_group=4"
    ).split(),
    changes(
        STRATEGIES
        + """
model.width=32 model.layers=2 model.head_dim=4 model.mlp_ratio=2 model.patch_size=2
model.image_size=4 | data.eval_resize=12
model.classes=2 | data.source=folder data.path={files}/folder
model.head_bias=false prescription.position_lr=8.0 prescription.head_bias_lr=8.0
data.source=folder | data.path={files}/folder model.classes=2
data.path={files}/folder | data.source=folder model.classes=2
data.validation_fraction=0.5 data.eval_resize=12
data.augmentation.crop_scale=[0.3,0.4] data.augmentation.crop_ratio=[2.0,3.0]
data.augmentation.flip=0.5 data.augmentation.rand_augment=rand-m9-mstd0.5-inc1
data.augmentation.mixup=0 data.augmentation.cutmix=0 data.augmentation.cutmix_share=0.9
data.augmentation.mix_group=2 data.augmentation.erasing=1.0
data.augmentation.label_smoothing=0.3
"""
    ),
    elsewhere={
        "optimizer.atan2_lambda": NO_RATES,
        "optimizer.min_dim_factored": NO_RATES,
        "data.max_unreadable": "test_data",
    },
    alone=dict.fromkeys(("data.source", "model.classes", "data.path"), ()),
    cache=tuple(SHARDS),
    imports=frozenset({"datasets", "timm"}),
)

CIFAR5M = Case(
    "vit_cifar5m",
    (
        LOOP + "model.head_dim=2 model.heads=2 model.layers=1 model.patch_size=16 "
        "optimizer.name=adam optimizer.lr=0.1 schedule.name=linear data.train_images=80 "
        "data.validation_images=12"
    ).split(),
    changes(
        OBSERVED
        + ATAN2
        + """
model.head_dim=4 model.heads=4 model.layers=2 model.patch_size=32
prescription.alpha_attention=0.5 prescription.beta0=1.0 prescription.zero_readout=true
prescription.alpha_depth=0.5 | model.layers=2
prescription.gamma0=0.5 | SGD
data.path={files}/two | FILES
data.train_images=90 data.seed=7 data.validation_images=7
"""
    )
    | {"data.source": ("cifar5m", *FILES[1:])},
    elsewhere={
        "optimizer.min_dim_factored": NO_RATES,
        "data.repeat": "test_a_run_that_would_see_images_twice_is_refused_unless_it_may",
    },
    refused=("model.image_size", "model.classes"),
    alone={"data.source": ()},
    cache=tuple(FILES),
)
CASES = {case.name: case for case in (NANOLM, BART, IMAGENET, CIFAR5M)}


def write_texts(root: Path) -> None:
    """Two folders of little documents, and a file with two columns of text."""
    random = np.random.default_rng(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(random.choice(syllables, random.integers(1, 4))) for _ in range(200)]
    documents = {"one": [], "two": []}
    for folder, texts in documents.items():
        (root / folder).mkdir(parents=True)
        for index in range(40):
            sentences = [" ".join(random.choice(words, random.integers(3, 8))) for _ in range(6)]
            texts.append(" ".join(f"{sentence.capitalize()}." for sentence in sentences))
            (root / folder / f"{index:02}.txt").write_text(texts[-1])
    rows = [{"body": one, "text": two} for one, two in zip(*documents.values(), strict=True)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_tokenizer(root: Path) -> None:
    """A tokeniser of 70 pieces of the first folder's documents."""
    from nanolm_c4.data import train_tokenizer

    texts = [path.read_text() for path in sorted((root / "one").glob("*.txt"))]
    train_tokenizer(texts, 70, root / "tokenizer.model")


def write_photos(root: Path) -> None:
    """A folder of little JPEGs in ImageNet's layout, and the same as parquet shards."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    random = np.random.default_rng(0)
    (root / "shards").mkdir(parents=True)
    for split, count in (("train", 12), ("val", 5)):
        rows = []
        for label, name in enumerate(("cat", "dog")):
            folder = root / "folder" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                small = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
                file = io.BytesIO()
                Image.fromarray(small).resize((24, 20)).save(file, "JPEG")
                (folder / f"{index:02}.JPEG").write_bytes(file.getvalue())
                rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": label})
        for part in range(2):
            table = datasets.Dataset.from_list(rows[part::2], features=features)
            table.to_parquet(root / "shards" / f"{split}-{part}.parquet")


def write_pixels(root: Path) -> None:
    """Two folders of compressed parts of random pixels, as CIFAR-5m's."""
    random = np.random.default_rng(0)
    for folder in ("one", "two"):
        (root / folder).mkdir(parents=True)
        for number, images in ((0, 16), (5, 12)):
            pixels = random.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
            labels = random.integers(0, 10, images)
            np.savez_compressed(root / folder / f"part{number}.npz", X=pixels, Y=labels)


def write_files(case: Case, root: Path) -> None:
    if case is NANOLM:
        write_texts(root)
        write_tokenizer(root)
    elif case is BART:
        write_texts(root)
    elif case is IMAGENET:
        write_photos(root)
    else:
        write_pixels(root)
