"""The contract: the model can be built on meta, materialised, cast, initialised, stepped, copied, compiled,
and is the same model afterwards. It computes what Transformers computes. Tied stays tied, RoPE stays right and float32,
names are the Hub's, no Python sees data.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from qwen3_core import MODELS, Qwen3Config, Qwen3ForCausalLM, Yarn, to_hub
from qwen3_core.accounting import parameter_shapes
from qwen3_core.attention import scaled_dot_product_attention
from qwen3_core.model import GroupedQueryAttention
from qwen3_core.moe import grouped_experts
from qwen3_core.rope import rotary_frequencies
from qwen3_reference import assert_close, gradients, hf_model, pair, tiny, tiny_moe
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

BOTH = pytest.mark.parametrize("config", [tiny(), tiny_moe()], ids=["dense", "moe"])


def materialised(config: Qwen3Config, seed: int = 0) -> Qwen3ForCausalLM:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.to_empty(device="cpu")
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def some_tokens(length: int = 16, batch: int = 2) -> Tensor:
    return torch.arange(batch * length).view(batch, length) % 320


@pytest.mark.parametrize("config", [tiny(), tiny(tie_word_embeddings=True), tiny_moe(mlp_only_layers=(0,))])
def test_names_are_those_of_a_hub_checkpoint(config: Qwen3Config) -> None:
    theirs = hf_model(config)
    names = set(to_hub(Qwen3ForCausalLM(config).state_dict()))
    per_expert = set()
    for name in dict(theirs.named_parameters()):  # in memory Transformers 5 fuses experts; the Hub has them one by one
        if ".experts." in name:
            prefix = name.rpartition(".")[0]
            projections = ["down_proj"] if name.endswith("down_proj") else ["gate_proj", "up_proj"]
            per_expert |= {f"{prefix}.{e}.{p}.weight" for e in range(config.num_experts) for p in projections}
        else:
            per_expert.add(name)
    assert names == per_expert


@pytest.mark.parametrize("name", MODELS)
def test_every_published_size_builds_on_meta_with_the_shapes_that_accounting_counts(name: str) -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(MODELS[name])
    shapes = {key: tuple(t.shape) for key, t in model.state_dict().items()}
    assert list(shapes.items()) == list(parameter_shapes(MODELS[name]).items())


def test_tied_embeddings_survive_to_empty_casts_copies_and_an_optimizer_step() -> None:
    model = materialised(tiny(tie_word_embeddings=True))

    def tied(m: Qwen3ForCausalLM) -> bool:
        return m.lm_head.weight is m.model.embed_tokens.weight

    assert tied(model)
    assert [n for n, _ in model.named_parameters() if "embed" in n or "head" in n] == ["model.embed_tokens.weight"]
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    F.cross_entropy(model(some_tokens()).flatten(0, 1), some_tokens().flatten()).backward()
    optimizer.step()
    assert tied(model)
    assert not torch.equal(model.lm_head.weight, before)
    assert tied(model.to(torch.bfloat16))
    assert tied(copy.deepcopy(model))
    assert copy.deepcopy(model).lm_head.weight is not model.lm_head.weight
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert tied(torch.load(buffer, weights_only=False))


def test_replacing_the_embedding_of_a_tied_model_replaces_the_head() -> None:
    model = materialised(tiny(tie_word_embeddings=True))
    model.model.embed_tokens = nn.Embedding(328, 64)
    assert model(some_tokens()).shape == (2, 16, 328)


def test_untied_heads_are_apart() -> None:
    model = materialised(tiny())
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("scaling", [None, Yarn(4.0, 64)])
def test_rope_is_right_straight_after_to_empty_and_float32_after_a_cast(scaling: Yarn | None) -> None:
    config = tiny(rope_scaling=scaling)
    expected = rotary_frequencies(config)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    assert model.model.rotary_emb.inv_freq.is_meta
    with torch.no_grad():
        garbage = [torch.full((1 << 16,), float("nan")) for _ in range(8)]
        del garbage  # so that to_empty is likely to hand out memory full of NaN
    model.to_empty(device="cpu")
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)
    for cast in (model.to(torch.bfloat16), model.half(), model.double(), model.bfloat16()):
        inv_freq = cast.model.rotary_emb.inv_freq
        assert inv_freq.dtype == torch.float32
        assert torch.equal(inv_freq, expected)
    assert "inv_freq" not in "".join(model.state_dict())


def test_positions_stay_apart_in_a_bfloat16_model() -> None:
    # bfloat16 has 8 bits: positions 500 and 501 would be one if angles were computed in it.
    rope = Qwen3ForCausalLM(tiny()).bfloat16().model.rotary_emb
    cos, _ = rope(torch.tensor([[500, 501]]), torch.bfloat16)
    exact = torch.cos(torch.tensor([500.0, 501.0]))  # pair 0 turns one radian a position
    assert_close("cos", cos[0, :, 0].float(), exact, bound=1e-2)


# torch's fake kernel of grouped_mm knows bfloat16 only, so a float32 mixture of experts cannot be traced with
# it.
TRACED = pytest.mark.parametrize(
    ("config", "dtype"), [(tiny(), torch.float32), (tiny_moe(), torch.bfloat16)], ids=["dense", "moe"]
)


@TRACED
def test_meta_forward_gives_shapes_without_data(config: Qwen3Config, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model, tokens = Qwen3ForCausalLM(config).to(dtype), torch.zeros(2, 16, dtype=torch.long)
        positions = torch.zeros(2, 16, dtype=torch.long)
    assert model(tokens, positions).shape == (2, 16, config.vocab_size)


@TRACED
def test_one_graph_holds_for_any_data(config: Qwen3Config, dtype: torch.dtype) -> None:
    # fullgraph fails on any branch, loop or shape that depends on data; a second compilation would show one
    # too.
    torch._dynamo.reset()
    counter = CompileCounter()
    model = materialised(config).to(dtype)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for seed in range(3):
        x = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(seed))
        positions = torch.cat((torch.arange(seed + 3), torch.arange(13 - seed))).expand(2, -1)
        assert torch.equal(compiled(x, positions), model(x, positions))
        compiled(x, positions).sum().backward()
    assert counter.frame_count == 1


@BOTH
def test_attention_and_experts_are_replaced_by_passing_another_callable(config: Qwen3Config) -> None:
    calls: list[str] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        calls.append("attention")
        assert (q.shape, k.shape, v.shape) == ((2, 4, 16, 32), (2, 2, 16, 32), (2, 2, 16, 32))
        return scaled_dot_product_attention(q, k, v, mask)

    def experts(x: Tensor, ends: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        calls.append("experts")
        assert ends[-1] == len(x) == 2 * 16 * 2
        return grouped_experts(x, ends, gate, up, down)

    model = Qwen3ForCausalLM(config, attention=attention, experts=experts)
    plain = materialised(config)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(some_tokens()), plain(some_tokens()))
    layer = ["attention", "experts"] if config.num_experts else ["attention"]
    assert calls == layer * 2


def test_a_sequence_above_the_rope_maximum_is_an_error_and_below_it_changes_nothing() -> None:
    long, short = tiny(max_position_embeddings=128), tiny(max_position_embeddings=4096)
    model, other = materialised(long), materialised(short)
    x = torch.zeros(1, 129, dtype=torch.long)
    with pytest.raises(ValueError, match=r"129.*128"):
        model(x)
    assert torch.equal(model(x[:, :100]), other(x[:, :100]))


def test_a_layer_that_holds_half_the_heads_works_unchanged() -> None:
    # What tensor parallelism makes of it: half the rows of q, k, v, half the columns of o; the halves add up.
    model = materialised(tiny())
    whole = GroupedQueryAttention(tiny(), scaled_dot_product_attention)
    whole.load_state_dict(
        {
            k.removeprefix("model.layers.0.self_attn."): t
            for k, t in model.state_dict().items()
            if ".layers.0.self_attn." in k
        }
    )
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    rotation = model.model.rotary_emb(torch.arange(16)[None], x.dtype)
    parts = []
    for rank in range(2):
        part = copy.deepcopy(whole)
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(part, name)
            linear.weight = nn.Parameter(linear.weight.chunk(2)[rank])
        part.o_proj.weight = nn.Parameter(part.o_proj.weight.chunk(2, dim=1)[rank])
        parts.append(part(x, rotation, None, None))
    assert_close("sum over ranks", parts[0] + parts[1], whole(x, rotation, None, None))


def test_mlp_and_experts_that_hold_half_the_hidden_size_add_up() -> None:
    # Tensor parallelism again: half the rows of gate and up, half the columns of down; no rank computes all
    # of it.
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    for config in (tiny(), tiny_moe()):
        whole = materialised(config).get_submodule("model.layers.0.mlp")
        parts = []
        for rank in range(2):
            part = copy.deepcopy(whole)
            for name, weight in list(part.named_parameters()):
                if "gate.weight" not in name:  # the router is whole on every rank
                    dim = -1 if "down_proj" in name else -2
                    weight.data = weight.data.chunk(2, dim=dim)[rank].contiguous()
            parts.append(part(x))
        assert_close("sum over ranks", parts[0] + parts[1], whole(x))


YARN = Yarn(factor=4.0, original_max_position_embeddings=64)


CONFIGS = {
    "dense": tiny(),
    "tied": tiny(tie_word_embeddings=True),
    "one key head a query head": tiny(num_key_value_heads=4),
    "eight query heads a key head": tiny(num_attention_heads=8, num_key_value_heads=1),
    "32B's head_dim rule": tiny(hidden_size=80, num_attention_heads=8, head_dim=16),
    "theta 1e7": tiny(rope_theta=1e7),
    "YaRN": tiny(rope_scaling=YARN),
    "YaRN, all its fields": tiny(
        rope_scaling=Yarn(2.0, 100, beta_fast=16.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.7, truncate=False)
    ),
    "YaRN, attention factor given": tiny(rope_scaling=Yarn(4.0, 64, attention_factor=1.3)),
    "experts": tiny_moe(),
    "experts, weights not normalised": tiny_moe(norm_topk_prob=False),
    "experts, tied": tiny_moe(tie_word_embeddings=True),
    "experts, layer 1 dense": tiny_moe(num_hidden_layers=3, mlp_only_layers=(1,)),
    "experts in every second layer": tiny_moe(num_hidden_layers=4, decoder_sparse_step=2),
    "experts, more layers than experts": tiny_moe(num_hidden_layers=4, num_experts=2),
    "experts, all of them": tiny_moe(num_experts=4, num_experts_per_tok=4),
    "experts, YaRN": tiny_moe(rope_scaling=YARN),
}


def tokens(config: Qwen3Config, batch: int, length: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("batch", "length"), [(2, 64), (1, 37)])
def test_logits_and_all_gradients_equal_transformers(config: Qwen3Config, batch: int, length: int) -> None:
    ours, theirs = pair(config)
    x, targets = tokens(config, batch, length + 1).split([length, 1], dim=1)[0], tokens(config, batch, length)
    mine, reference = ours(x), theirs(input_ids=x).logits
    assert_close("logits", mine, reference)
    for position in (0, 1, 17, min(63, length - 1)):
        assert_close(f"logits at {position}", mine[:, position], reference[:, position])
    for logits in (mine, reference):
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for name, a, b in gradients(ours, theirs):
        assert_close(f"gradient of {name}", a, b)


@pytest.mark.parametrize("config", [tiny(), tiny_moe(), tiny(rope_scaling=YARN)], ids=["dense", "moe", "yarn"])
def test_packed_documents_equal_transformers_and_each_document_alone(config: Qwen3Config) -> None:
    ours, theirs = pair(config)
    lengths = (1, 23, 40)
    x = tokens(config, 1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    mine, reference = ours(x, positions), theirs(input_ids=x, position_ids=positions, use_cache=False).logits
    assert_close("logits", mine, reference)
    for n, piece, alone in zip(lengths, mine.split(lengths, dim=1), x.split(lengths, dim=1), strict=True):
        assert_close(f"document of {n}", piece, ours(alone))
    for logits in (mine, reference):
        F.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
    for name, a, b in gradients(ours, theirs):
        assert_close(f"gradient of {name}", a, b)


def test_rows_of_a_batch_may_be_packed_differently() -> None:
    ours, _ = pair(tiny())
    x = tokens(ours.config, 2, 12)
    rows = [torch.arange(12), torch.cat((torch.arange(5), torch.arange(7)))]
    both = ours(x, torch.stack(rows))
    for row, positions in enumerate(rows):
        assert_close(f"row {row}", both[row : row + 1], ours(x[row : row + 1], positions[None]))


def test_a_document_that_starts_in_the_middle_is_not_joined_to_the_one_before() -> None:
    # A chunk of a long document that goes on in the next sample: positions jump from 4 to 100, never back to
    # 0.
    ours, _ = pair(tiny())
    x = tokens(ours.config, 1, 9)
    positions = torch.cat((torch.arange(5), torch.arange(100, 104)))[None]
    packed = ours(x, positions)
    assert_close("second document", packed[:, 5:], ours(x[:, 5:], positions[:, 5:]))


def test_positions_of_one_document_give_what_no_positions_give() -> None:
    ours, _ = pair(tiny())
    x = tokens(ours.config, 1, 33)
    assert_close("logits", ours(x, torch.arange(33)[None]), ours(x))


@pytest.mark.parametrize("config", [tiny(), tiny_moe()], ids=["dense", "moe"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(config: Qwen3Config) -> None:
    ours, theirs = pair(config)
    x = tokens(config, 4, 64)
    exact = theirs(input_ids=x).logits

    def error(
        logits: torch.Tensor,
    ) -> float:  # of the mean square, as a flipped expert moves single entries far
        return ((logits.float() - exact).square().mean() / exact.square().mean()).sqrt().item()

    mine, reference = error(ours.bfloat16()(x)), error(theirs.bfloat16()(input_ids=x).logits)
    assert mine <= 1.25 * reference, (mine, reference)


def test_the_comparison_itself_sees_a_wrong_rope() -> None:
    # Guard of the guard: theta 1e6 against 1e4 must fail at position 63, and pass at 0.
    ours, _ = pair(tiny())
    wrong = hf_model(tiny(rope_theta=1e4))
    wrong.load_state_dict({**pair(tiny())[1].state_dict()})
    x = tokens(ours.config, 1, 64)
    mine, theirs = ours(x), wrong(input_ids=x).logits
    assert_close("position 0", mine[:, 0], theirs[:, 0])
    with pytest.raises(AssertionError, match="position 63"):
        assert_close("position 63", mine[:, 63], theirs[:, 63])
