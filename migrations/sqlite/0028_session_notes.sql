-- What happened to the calls of a session, also to those that were refused: the sum of numbers for each kind.
ALTER TABLE session ADD COLUMN notes INTEGER NOT NULL DEFAULT 0;
