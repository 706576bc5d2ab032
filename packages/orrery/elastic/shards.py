"""Assign each site a shard of the data. All sites read the log, so their assignments agree.

- A site keeps its shard while it is a member. A new member gets the shard that its operator asked
  for. If this shard is taken, or none was asked for, it gets the lowest free shard.
- A shard advances with every round in which a site held it, even if the site was lost. Hence no
  document is trained twice before its shard is exhausted.
"""

import msgspec

from orrery.elastic.types import ElasticError, SiteMember


class ShardMap(msgspec.Struct):
    """`trained[k]` counts the trained documents of shard k. `holders` maps site ids to shards."""

    trained: list[int]
    holders: dict[str, int] = {}

    def finish_round(self, members: tuple[SiteMember, ...], num_documents: int) -> None:
        """Count `num_documents` for each held shard, then assign shards for the next round.

        Raise ElasticError if there are more members than shards.
        """
        for shard in self.holders.values():
            self.trained[shard] += num_documents
        kept = {each.id: self.holders[each.id] for each in members if each.id in self.holders}
        for member in members:
            if member.id not in kept:
                free = sorted(set(range(len(self.trained))) - set(kept.values()))
                if not free:
                    raise ElasticError(
                        f"stages.sft.data.num_shards {len(self.trained)}: {len(members)} sites "
                        f"take part, so site {member.id[:8]} gets no shard; let it leave"
                    )
                kept[member.id] = member.shard if member.shard in free else free[0]
        self.holders = kept
