-- How long a rollout keeps an upload that it names: 0 as long as its payload, 1 until a batch with it is acked, 2 until that
-- batch is settled.

ALTER TABLE blob_use ADD COLUMN kept BIGINT NOT NULL DEFAULT 0;
