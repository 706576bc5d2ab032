"""The plan of runs: golden for the checked-in runs of several nodes, laws for every shape."""

import itertools

import pytest

from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import find_workspace, load
from orrery.manifest.plan import ONE_NODE, NodeGroup, StagePlan, plan, stage
from orrery.manifest.schema import Manifest

WORKSPACE = find_workspace()


def shown(one: StagePlan) -> list[str]:
    """A stage as text: its groups, then what is on which of its nodes."""
    lines = [f"{group.name} {group.first_node}+{group.num_nodes}" for group in one.groups]
    for node in range(one.num_nodes):
        here = [process for process in one.processes if process.node == node]
        lines.append(
            f"{node}: "
            + " ".join(f"{process.role}{process.index}/{process.num_devices}" for process in here)
        )
    return lines


def ranks(first: int) -> str:
    return " ".join(f"trainer{rank}/1" for rank in range(first, first + 8))


def glm5(prefills: int, decoding: int) -> dict[str, list[str]]:
    """Engines of two nodes prefill, engines of eight nodes decode, twelve nodes train."""
    first, engines, headless = 0, [], 0
    for index in range(prefills + decoding):
        engines.append(f"{first}: inference{index}/8" + " orchestrator0/0" * (index == 0))
        size = 2 if index < prefills else 8
        for node in range(first + 1, first + size):
            engines.append(f"{node}: headless{headless}/8")
            headless += 1
        first += size
    trainers = [f"{first + number}: {ranks(8 * number)}" for number in range(12)]
    groups = [f"prefill 0+{2 * prefills}", f"decode {2 * prefills}+{8 * decoding}"]
    return {
        "init": ["all 0+1", "0: trainer0/1"],
        "rl": [*groups, f"trainer {first}+12", *engines, *trainers],
        "evaluate": [*groups, *engines],
        "report": ["all 0+1", "0: report0/0"],
    }


GOLDEN = {
    "glm5_run": glm5(4, 1),
    "glm5_run_32": glm5(2, 2),
    "glm5_shape_smoke": {
        "init": ["all 0+1", "0: trainer0/1"],
        "sft": ["trainer 0+2", "0: trainer0/1", "1: trainer1/1"],
        "rl": [
            "prefill 0+1",
            "decode 1+1",
            "trainer 2+2",
            "0: inference0/1 orchestrator0/0",
            "1: inference1/1",
            "2: trainer0/1",
            "3: trainer1/1",
        ],
        "evaluate": [
            "prefill 0+1",
            "decode 1+1",
            "0: inference0/1 orchestrator0/0",
            "1: inference1/1",
        ],
        "report": ["all 0+1", "0: report0/0"],
    },
    "qwen3_30b_a3b_16k_wide": {
        "init": ["all 0+1", "0: trainer0/1"],
        "rl": [
            "inference 0+1",
            "trainer 1+1",
            "0: inference0/4 inference1/4 router0/0 orchestrator0/0",
            f"1: {ranks(0)}",
        ],
        "evaluate": ["inference 0+1", "0: inference0/4 inference1/4 router0/0 orchestrator0/0"],
        "report": ["all 0+1", "0: report0/0"],
    },
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_run_of_several_nodes_is_placed_as_written_here(name):
    assert {one.name: shown(one) for one in plan(load(WORKSPACE.manifest_path(name)))} == GOLDEN[
        name
    ]


def test_a_run_of_one_node_has_one_group_in_every_stage():
    for one in plan(load(WORKSPACE.manifest_path("reverse_text_smoke"))):
        assert one.groups == ONE_NODE == (NodeGroup("all", 0, 1),) and one.num_nodes == 1
        assert {process.node for process in one.processes} == {0}


def test_a_store_that_engines_share_is_planned_before_them_wherever_they_serve():
    servers = "kv_store0/0 inference0/1 inference1/1 router0/0 orchestrator0/0"
    manifest = load(WORKSPACE.manifest_path("reverse_text_kv_store"))
    assert {one.name: shown(one) for one in plan(manifest)} == {
        "init": ["all 0+1", "0: trainer0/1"],
        "sft": ["all 0+1", "0: trainer0/1"],
        "rl": ["all 0+1", f"0: {servers} trainer0/1"],
        "evaluate": ["all 0+1", f"0: {servers}"],
        "report": ["all 0+1", "0: report0/0"],
    }
    store = stage(manifest, "rl").processes[0]
    assert (store.module, store.ends) == ("orrery.inference.kv_store", "with_stage")
    data = shape(per_node=1, wide=1, prefill_nodes=0, other_nodes=2, trainer_nodes=1).model_dump(
        mode="json"
    )
    data["inference"]["kv_offload"] = {
        "kind": "mooncake",
        "protocol": "tcp",
        "segment_bytes": 1 << 26,
    }
    assert shown(stage(check(data, "shape"), "evaluate")) == [
        "inference 0+2",
        "0: kv_store0/0 inference0/1 router0/0 orchestrator0/0",
        "1: inference1/1",
    ]


ROUTER = {
    "kind": "vllm_router",
    "policy": "cache_aware",
    "balance_abs_threshold": 2,
    "balance_rel_threshold": 1.1,
}


def shape(
    per_node: int, wide: int, prefill_nodes: int, other_nodes: int, trainer_nodes: int
) -> Manifest:
    """A run of engines of `wide` devices over so many whole nodes."""
    data = load(WORKSPACE.manifest_path("glm5_shape_smoke")).model_dump(mode="json")
    engines = per_node // wide
    data["hardware"] |= {
        "num_nodes": prefill_nodes + other_nodes + trainer_nodes,
        "devices_per_node": per_node,
    }
    data["inference"] |= {
        "num_replicas": (prefill_nodes + other_nodes) * engines,
        "prefill_replicas": prefill_nodes * engines,
        "tensor_parallel": wide,
        "kv_transfer": {"kind": "nixl" if prefill_nodes else "none"},
        "router": {"kind": "none"} if prefill_nodes else ROUTER,
    }
    data["trainer"]["mesh"]["dp_shard"] = trainer_nodes * per_node
    return check(data, "shape")


def wide_shape(**inference) -> Manifest:
    """glm5_run with engines over nodes, on 16 nodes of engines as before."""
    data = load(WORKSPACE.manifest_path("glm5_run")).model_dump(mode="json")
    data["inference"] |= {"nodes_per_replica": 4, "num_replicas": 4, "tensor_parallel": 2}
    data["inference"] |= {"prefill_replicas": 0, "prefill": None, "kv_transfer": {"kind": "none"}}
    data["inference"] |= {"data_parallel": 16, "router": ROUTER} | inference
    return check(data, "wide")


def test_an_engine_over_nodes_fills_them_in_order():
    one = stage(wide_shape(), "evaluate")
    assert [shown(one)[node + 1].split()[1] for node in range(16)] == [
        *("inference0/8", "headless0/8", "headless1/8", "headless2/8"),
        *("inference1/8", "headless3/8", "headless4/8", "headless5/8"),
        *("inference2/8", "headless6/8", "headless7/8", "headless8/8"),
        *("inference3/8", "headless9/8", "headless10/8", "headless11/8"),
    ]
    headless = [process for process in one.processes if process.role == "headless"]
    assert [(each.engine, each.part, each.whole) for each in headless[3:6]] == [
        (1, 1, "inference.1"), (1, 2, "inference.1"), (1, 3, "inference.1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inference", "sentence"),
    [
        ({"data_parallel": 8}, "16 on 4 nodes: an engine fills its nodes of 8 devices; set"),
        ({"data_parallel": 2}, "nodes_per_replica 4 does not divide data_parallel 2"),
    ],
)
def test_an_engine_that_leaves_devices_of_its_nodes_is_refused(inference, sentence):
    with pytest.raises(OrreryError, match=sentence):
        wide_shape(**inference)


SHAPES = [
    (per_node, wide, *nodes)
    for per_node, wide in ((1, 1), (2, 1), (4, 2), (8, 1), (8, 8))
    for nodes in itertools.product((0, 1, 3), (1, 2), (1, 2, 5))
]


def test_every_shape_fills_its_nodes_in_order_and_mixes_no_groups():
    for per_node, wide, prefill, other, trainer in SHAPES:
        manifest = shape(per_node, wide, prefill, other, trainer)
        for one in plan(manifest):
            # groups follow one another without a gap, and contain every process
            assert [group.first_node for group in one.groups] == [
                sum(group.num_nodes for group in one.groups[:number])
                for number in range(len(one.groups))
            ]
            assert {process.node for process in one.processes} == set(range(one.num_nodes))
            for node in range(one.num_nodes):
                here = [process for process in one.processes if process.node == node]
                assert len({process.role for process in here if process.num_devices}) <= 1
                if one.groups != ONE_NODE:
                    assert sum(process.num_devices for process in here) == per_node
            for role in ("inference", "trainer"):
                nodes = [process.node for process in one.processes if process.role == role]
                assert nodes == sorted(nodes)
            assert all(
                process.node == 0
                for process in one.processes
                if process.role in ("router", "orchestrator", "report")
            )
        rl = stage(manifest, "rl")
        assert rl.num_nodes == manifest.hardware.num_nodes
        first = {
            group.name: range(group.first_node, group.first_node + group.num_nodes)
            for group in rl.groups
        }
        assert list(first) == (
            ["prefill", "decode", "trainer"] if prefill else ["inference", "trainer"]
        )
        if prefill:
            apart = [
                process.node in first["prefill"]
                for process in rl.processes
                if process.role == "inference"
            ]
            assert apart.count(True) == manifest.inference.prefill_replicas and apart == sorted(
                apart, reverse=True
            )
        assert stage(manifest, "sft").num_nodes == trainer
        assert stage(manifest, "evaluate").groups == rl.groups[:-1]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shape_with_a_node_too_many_or_too_few_is_refused(change):
    for per_node, wide, *nodes in SHAPES:
        data = shape(per_node, wide, *nodes).model_dump(mode="json")
        data["hardware"]["num_nodes"] += change
        if data["hardware"]["num_nodes"] == 1:
            continue  # one node holds everything, and other constraints apply
        left = (nodes[-1] + change) * per_node  # devices left for the trainer
        instead = f", or trainer.mesh's dp_replicate·dp_shard·cp to {left}" if left else ""
        with pytest.raises(
            OrreryError,
            match=rf"nodes are {sum(nodes)}; set hardware.num_nodes to {sum(nodes)}{instead}$",
        ):
            check(data, "shape")
