-- Room reserved before work starts, and which versions generated the trained tokens of a rollout.

CREATE TABLE admission (
    admission_pk BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    admission_id BYTEA NOT NULL UNIQUE,
    policy_pk BIGINT NOT NULL REFERENCES policy (policy_pk),
    granted BIGINT NOT NULL,
    used BIGINT NOT NULL,
    version BIGINT NOT NULL,
    expires_us BIGINT NOT NULL,
    CHECK (used BETWEEN 0 AND granted)
);

CREATE INDEX admission_by_policy ON admission (policy_pk, expires_us);
CREATE INDEX admission_by_expiry ON admission (expires_us);

-- JSON [[segment, version, trained tokens], ...], where the policy masks what is over the staleness bound.
ALTER TABLE rollout ADD COLUMN trained_spans TEXT;

-- Tokens of older versions are delivered with mask 0; set at the first delivery.
ALTER TABLE rollout_group ADD COLUMN mask_below BIGINT;
