-- How rollout_key and group_key are made of ids, for as long as the file lives: 'ordered', as they are, or 'hashed', where
-- an earlier version has hashed some. Of Postgres all are hashed.
CREATE TABLE key_form (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    form TEXT NOT NULL CHECK (form IN ('hashed', 'ordered'))
) STRICT;

INSERT INTO key_form (only, form)
SELECT 1, IIF(EXISTS (SELECT 1 FROM rollout_group) OR EXISTS (SELECT 1 FROM rollout), 'hashed', 'ordered');
