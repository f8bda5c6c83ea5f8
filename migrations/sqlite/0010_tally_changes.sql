-- What a tally is. On Postgres, changes that have not been added to it yet belong to it as well.
CREATE VIEW tally_now AS
SELECT policy_pk, name, value, amount, latest_us
FROM tally;
