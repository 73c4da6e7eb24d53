"""Faults of experts that ranks share."""

from ..fault import Fault

_PEERS = "tests/distributed/expert_parallel/test_peers_on_cpu.py::"

FAULTS = [
    Fault(
        file="distributed/expert_parallel/push.py",
        old='"own_scores": returning_at + given_back.scores,',
        new='"own_scores": receiving_at + received.scores,',
        caught_by=_PEERS + "test_tokens_go_where_their_experts_are[True-None-two]",
        why="a rank writes its own scores over those that it receives",
    ),
    Fault(
        file="distributed/expert_parallel/give_back.py",
        old="num_sums=ceil_div(num_tokens * num_pieces, item_pieces),",
        new="num_sums=max(1, num_tokens * num_pieces // item_pieces),",
        caught_by=_PEERS + "test_rows_go_back_to_where_tokens_came_from[False-two]",
        why="the last tokens of a chunk are not summed",
    ),
    Fault(
        file="distributed/expert_parallel/collective.py",
        old="to_row = (sent.cumsum(0) - 1 + begins).where(sent, -1)",
        new="to_row = (sent.cumsum(0) - 1).where(sent, -1)",
        caught_by="tests/distributed/expert_parallel/test_experts.py::"
        "test_it_is_near_one_process_with_all_experts[2]",
        why="what comes back from a rank is added to tokens of other ranks",
    ),
    Fault(
        file="distributed/expert_parallel/transport.py",
        old="self.received_ids = self.dispatch(self.own_ids)",
        new="self.received_ids = self.dispatch(self.own_ids.flip(1))",
        caught_by="tests/distributed/expert_parallel/test_transport.py::"
        "test_ranks_may_receive_tokens_without_an_expert_there[few-False-frozen]",
        why="the choices of a token come in another order than their scores",
    ),
    Fault(
        file="distributed/shard.py",
        old="module.num_experts), weights.where(is_here, 0)",
        new="module.num_experts), weights",
        caught_by="tests/distributed/test_shard_experts.py::"
        "test_choices_held_elsewhere_are_of_no_expert_and_have_score_0",
        why="choices of other ranks keep their scores",
    ),
]
