-- Warnings about the calls of a session, as a JSON array of texts.
ALTER TABLE session_policy ADD COLUMN warnings TEXT;
