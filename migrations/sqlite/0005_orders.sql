-- Orders in which groups go into batches, batches go out again and are listed: whatever takes the first of them reads no
-- others.

-- Highest version first; a group that trains nothing has none, and nothing in it is old.
CREATE INDEX rollout_group_freshest
ON rollout_group (policy_pk, run, COALESCE(version_min, 9223372036854775807) DESC, ready_seq)
WHERE state = 'ready';

-- By the step that had consumed them, then those without one.
CREATE INDEX batch_returned ON batch (policy_pk, run, COALESCE(step, 9223372036854775807), batch_pk)
WHERE state = 'returned';

CREATE INDEX batch_in_order ON batch (policy_pk, batch_pk);
