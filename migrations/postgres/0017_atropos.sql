-- The state of foreign protocols that is not data: which trainer and which environments have registered, and how far a
-- trainer has read. Each is one document, changed by compare-and-set.

CREATE TABLE facade_state (
    -- The protocol and the policy.
    name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    -- One more with every change.
    revision BIGINT NOT NULL CHECK (revision > 0),
    -- JSON.
    body TEXT NOT NULL
);
