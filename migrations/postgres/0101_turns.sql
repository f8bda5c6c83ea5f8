-- What the comparison of turns reads and computes, in groups whose rules compare turns; null in others.

-- Reward and state of each turn: a 64-bit float and 64 bits of a hash, little-endian.
ALTER TABLE rollout ADD COLUMN turns BYTEA;

-- The advantage of each turn, a 64-bit float, little-endian. Null before the group is decided.
ALTER TABLE rollout ADD COLUMN turn_advantages BYTEA;
