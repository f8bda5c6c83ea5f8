-- Special tokens of the model in the texts of the calls of a session.
ALTER TABLE session_policy ADD COLUMN special_tokens BIGINT NOT NULL DEFAULT 0;
