"""Vision, diffusion and speech: cases as traced_blocks.py has them."""

import torch
import torch.nn.functional as F
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from tests.param_groups.traced_blocks import (
    HEAD,
    IDS,
    LINES,
    TOKENS,
    Apart,
    Mlp,
    case,
    heads,
    linear,
    lines,
    merged,
    root,
)

IMAGE = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).sin()
look = lambda model: model(IMAGE)


def patches(x, size=4):
    x = x.unfold(2, size, size).unfold(3, size, size)
    return x.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)


class ToQkv(nn.Module):
    """As in vit-pytorch: fused by name and by tensor, `scale` held, `head_dim` not."""

    def __init__(self, n):
        super().__init__()
        self.heads, self.scale = n // HEAD, HEAD**-0.5
        self.to_qkv, self.to_out = linear(n, 3 * n), nn.Sequential(linear(n, n), nn.Dropout(0.3))

    def forward(self, x):
        q, k, v = map(heads, self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        return self.to_out(merged(torch.matmul(dots.softmax(dim=-1), v)))


class Vit(nn.Module):
    def __init__(self, n, attention=ToQkv):
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, n), nn.LayerNorm(n))
        self.cls = nn.Parameter(torch.randn(1, 1, n))
        self.pos = nn.Parameter(torch.randn(1, 17, n))
        parts = lambda: {"n1": nn.LayerNorm(n), "attn": attention(n), "mlp": Mlp(n)}
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(2))
        self.head = nn.Linear(n, 5)

    def forward(self, image):
        x = self.embed(patches(image))
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
        x = x + self.pos[:, : x.shape[1]]
        for block in self.blocks:
            x = x + block.attn(block.n1(x))
            x = x + block.mlp(x)
        return self.head(x[:, 0])


LINES["Vit"] = lines("""Mlp
norm_scale: embed.0.weight embed.2.weight blocks.*.n1.weight
norm_bias: embed.0.bias embed.2.bias blocks.*.n1.bias
patch_embedding 48 0: embed.1.weight
hidden_bias: embed.1.bias
position_embedding: cls pos
readout n -1: head.weight
readout_bias: head.bias""")


@case(root, look)
def vit_with_to_qkv(n):
    """Vit
    qkv n -1: blocks.*.attn.to_qkv.weight
    attention_output n -1: blocks.*.attn.to_out.0.weight
    """
    return Vit(n)


class Talking(nn.Module):
    """CaiT's: queries apart from keys with values, heads mixed before and after the softmax."""

    def __init__(self, n):
        super().__init__()
        self.to_q, self.to_kv, self.out = linear(n, n), linear(n, 2 * n), linear(n, n)
        self.pre = nn.Parameter(torch.randn(n // HEAD, n // HEAD))
        self.post = nn.Parameter(torch.randn(n // HEAD, n // HEAD))
        self.gain = nn.Parameter(torch.full((1, 1, n), 0.1))

    def forward(self, x):
        q, (k, v) = heads(self.to_q(x)), map(heads, self.to_kv(x).chunk(2, dim=-1))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * HEAD**-0.5
        dots = torch.einsum("bhij,hg->bgij", dots, self.pre)
        dots = torch.einsum("bhij,hg->bgij", dots.softmax(dim=-1), self.post)
        return self.out(merged(torch.einsum("bhij,bhjd->bhid", dots, v))) * self.gain


@case(root, look)
def talking_heads(n):
    """Vit
    query n -1: blocks.*.attn.to_q.weight
    key_value n -1: blocks.*.attn.to_kv.weight
    attention_output n -1: blocks.*.attn.out.weight
    hidden/transposed n//8 -1: blocks.*.attn.pre blocks.*.attn.post
    layer_scale 0.1: blocks.*.attn.gain
    """
    return Vit(n, Talking)


class Windowed(nn.Module):
    """Swin's attention: a table of relative positions added to scores."""

    def __init__(self, n):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(49, n // HEAD))
        self.qkv, self.proj = nn.Linear(n, 3 * n), linear(n, n)
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        near = (at[:, :, None] - at[:, None]) + 3
        self.register_buffer("index", near[0] * 7 + near[1])

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(16, 16, -1).permute(2, 0, 1)
        scores = (q * HEAD**-0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
        return self.proj(merged(scores.softmax(-1) @ v))


@case(root, look)
class Swin(nn.Module):
    """Two stages, the second twice as wide.

    patch_embedding 12 0: patch.weight
    hidden_bias: patch.bias stages.*.attn.qkv.bias
    norm_scale: stages.*.norm.weight
    norm_bias: stages.*.norm.bias norm.bias
    relative_position: stages.*.attn.table
    qkv n//2 -1: stages.0.attn.qkv.weight
    qkv n -1: stages.1.attn.qkv.weight
    attention_output n//2 -1: stages.0.attn.proj.weight
    attention_output n -1: stages.1.attn.proj.weight
    mlp_in n//2 -1: stages.0.mlp.up.weight
    mlp_in n -1: stages.1.mlp.up.weight
    mlp_out 2*n -1: stages.0.mlp.down.weight
    mlp_out 4*n -1: stages.1.mlp.down.weight
    hidden 2*n -1: merge.weight
    final_norm_scale: norm.weight
    readout n -1: head.weight
    readout_bias: head.bias
    """

    def __init__(self, n):
        super().__init__()
        self.patch = nn.Conv2d(3, n // 2, 2, 2)
        self.stages = nn.ModuleList(self.stage(width) for width in (n // 2, n))
        self.merge = linear(2 * n, n)
        self.norm, self.head = nn.LayerNorm(n), nn.Linear(n, 5)

    @staticmethod
    def stage(n):
        parts = {"norm": nn.LayerNorm(n), "attn": Windowed(n), "mlp": Mlp(n)}
        return nn.ModuleDict(parts)

    @staticmethod
    def block(stage, x):
        size = x.shape[1]
        y = stage.norm(x).unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).transpose(2, 3)
        y = stage.attn(y.flatten(0, 2).flatten(1, 2)).unflatten(0, (len(x), size // 4, -1))
        y = y.unflatten(3, (4, 4)).transpose(2, 3).flatten(1, 2).flatten(2, 3)
        x = x + y
        return x + stage.mlp(x)

    def forward(self, image):
        x = self.block(self.stages[0], self.patch(image).permute(0, 2, 3, 1))
        parts = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        x = self.block(self.stages[1], self.merge(torch.cat(parts, -1)))
        return self.head(self.norm(x).mean((1, 2)))


def diffuse(model):
    return model(IMAGE, torch.tensor([0.3, 0.8]), torch.tensor([1, 5]))


@case(root, diffuse)
class DiT(nn.Module):
    """adaLN-zero: blocks are closed at first; a clock and classes as conditions.

    Apart Mlp
    patch_embedding 48 0: patch.weight
    hidden_bias: patch.bias clock.0.bias clock.2.bias blocks.*.ada.bias ada.bias
    patch_embedding 10 0: clock.0.weight
    hidden n -1: clock.2.weight
    token_embedding: classes.weight
    hidden n -1 0: blocks.*.ada.weight ada.weight
    readout n -1 0: final.weight
    readout_bias: final.bias
    """

    def __init__(self, n):
        super().__init__()
        self.patch = nn.Conv2d(3, n, 4, 4)
        self.clock = nn.Sequential(nn.Linear(10, n), nn.SiLU(), nn.Linear(n, n))
        self.classes = nn.Embedding(7, n)
        parts = lambda: {"ada": nn.Linear(n, 6 * n), "attn": Apart(n), "mlp": Mlp(n)}
        self.blocks = nn.ModuleList(nn.ModuleDict(parts()) for _ in range(2))
        self.ada, self.final = nn.Linear(n, 2 * n), nn.Linear(n, 48)
        for layer in (*(block.ada for block in self.blocks), self.ada, self.final):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, image, time, kind):
        angles = time[:, None] * torch.exp(-torch.arange(5.0))
        c = self.clock(torch.cat((angles.cos(), angles.sin()), -1)) + self.classes(kind)
        x = self.patch(image).flatten(2).transpose(1, 2)
        norm = lambda x: F.layer_norm(x, x.shape[-1:])
        for block in self.blocks:
            parts = block.ada(F.silu(c))[:, None].chunk(6, dim=-1)
            y = block.attn(norm(x) * (1 + parts[1]) + parts[0])
            x = x + parts[2] * y
            x = x + parts[5] * block.mlp(norm(x) * (1 + parts[4]) + parts[3])
        shift, scale = self.ada(F.silu(c))[:, None].chunk(2, dim=-1)
        return self.final(norm(x) * (1 + scale) + shift)


class Cross(nn.Module):
    def __init__(self, n, bias=True):
        super().__init__()
        self.query, self.key = nn.Linear(n, n, bias), linear(n, n)
        self.value, self.out = nn.Linear(n, n, bias), nn.Linear(n, n, bias)

    def forward(self, x, other=None):
        other = x if other is None else other
        q, k, v = heads(self.query(x)), heads(self.key(other)), heads(self.value(other))
        scale = HEAD**-0.25
        scores = (q * scale) @ (k * scale).transpose(-1, -2)
        return self.out(merged(F.softmax(scores.float(), dim=-1) @ v))


def listen(model):
    return model(torch.linspace(0, 50, 320).sin().reshape(2, 10, 16), IDS)


@case(root, listen)
class Whisper(nn.Module):
    """Speech to text: convolutions, an encoder, a decoder that looks at it; ends tied or not.

    patch_embedding 30 0: conv1.weight
    hidden 3*n -1: conv2.weight
    hidden_bias: conv*.bias *.query.bias *.value.bias *.out.bias
    position_embedding kept: clock
    position_embedding: places
    token_embedding: words.weight
    norm_scale: *.n1.weight *.n2.weight
    norm_bias: *.n1.bias *.n2.bias middle.bias final.bias
    final_norm_scale: middle.weight final.weight
    query n -1: *.query.weight
    key n -1: *.key.weight
    value n -1: *.value.weight
    attention_output n -1: *.out.weight
    mlp_in n -1: *.up.weight
    mlp_out 4*n -1: *.down.weight
    readout n -1: head.weight
    """

    def __init__(self, n, tied=False):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(10, n, 3, padding=1), nn.Conv1d(n, n, 3, 2, padding=1)
        angles = torch.outer(torch.arange(8.0), torch.exp(-torch.arange(n / 2)))
        self.clock = nn.Parameter(torch.cat((angles.sin(), angles.cos()), 1), requires_grad=False)
        part = lambda: {"n1": nn.LayerNorm(n), "self": Cross(n), "mlp": Mlp(n)}
        self.encoder = nn.ModuleList(nn.ModuleDict(part()) for _ in range(2))
        more = lambda: {**part(), "cross": Cross(n), "n2": nn.LayerNorm(n)}
        self.decoder = nn.ModuleList(nn.ModuleDict(more()) for _ in range(2))
        self.words, self.places = nn.Embedding(TOKENS, n), nn.Parameter(torch.randn(12, n))
        self.middle, self.final = nn.LayerNorm(n), nn.LayerNorm(n)
        self.head = None if tied else linear(n, TOKENS)

    def forward(self, sound, ids):
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound)))).transpose(1, 2) + self.clock
        for block in self.encoder:
            x = x + block.self(block.n1(x))
            x = x + block.mlp(x)
        heard, x = self.middle(x), self.words(ids) + self.places[: ids.shape[1]]
        for block in self.decoder:
            x = x + block.self(block.n1(x))
            x = x + block.cross(block.n2(x), heard)
            x = x + block.mlp(x)
        x = self.final(x)
        return self.head(x) if self.head else x @ self.words.weight.T


@case(run=listen, refused="'words.weight' is a table and the readout at once")
def tied_by_a_product(n):
    return Whisper(n, tied=True)


@case(run=look)
def timm_mixer(n):
    """timm's, whose token MLPs sum over patches.

    patch_embedding 192 0: stem.proj.weight
    norm_scale: blocks.*.norm?.weight
    final_norm_scale: norm.weight
    norm_bias: blocks.*.norm?.bias norm.bias
    hidden_bias: stem.proj.bias blocks.*.fc?.bias
    widening 4 0: blocks.*.mlp_tokens.fc1.weight
    narrowing n//2 -1: blocks.*.mlp_tokens.fc2.weight
    mlp_in n -1: blocks.*.mlp_channels.fc1.weight
    mlp_out 4*n -1: blocks.*.mlp_channels.fc2.weight
    readout n -1 0: head.weight
    readout_bias: head.bias
    """
    return MlpMixer(5, img_size=16, patch_size=8, num_blocks=2, embed_dim=n)


@case(run=look)
def timm_resnet(n):
    """timm's, of a stem that does not grow; a block that changes the width is no branch.

    widening 147 0: conv1.weight
    widening 576 0: layer1.0.conv1.weight
    widening 64 0: layer1.0.downsample.0.weight
    hidden 9*n//4 -1: layer1.0.conv2.weight layer2.0.conv1.weight
    hidden n//4 -1: layer2.0.downsample.0.weight
    hidden 9*n//2 -1: layer2.*.conv?.weight layer3.0.conv1.weight
    mlp_out 9*n//2 -1: layer2.1.conv2.weight
    hidden 9*n//4 -1: layer2.0.conv1.weight
    hidden n//2 -1: layer3.0.downsample.0.weight
    hidden 9*n -1: layer3.0.conv2.weight layer4.0.conv?.weight
    hidden n -1: layer4.0.downsample.0.weight
    norm_scale: bn1.weight layer[12].*bn1.weight layer[12].*downsample.1.weight
    norm_scale 0: layer[12].*bn2.weight
    final_norm_scale: layer[34].*bn1.weight layer[34].*downsample.1.weight
    final_norm_scale 0: layer[34].*bn2.weight
    norm_bias: bn1.bias layer*.bias
    readout n -1: fc.weight
    readout_bias: fc.bias
    """
    return ResNet(BasicBlock, (1, 2, 1, 1), num_classes=5, channels=(n // 4, n // 2, n, n))
