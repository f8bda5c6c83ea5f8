SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public._sqlx_migrations (
    version bigint NOT NULL,
    description text NOT NULL,
    installed_on timestamp with time zone DEFAULT now() NOT NULL,
    success boolean NOT NULL,
    checksum bytea NOT NULL,
    execution_time bigint NOT NULL
);
CREATE TABLE public.batch (
    batch_pk bigint NOT NULL,
    batch_id bytea NOT NULL,
    policy_pk bigint NOT NULL,
    run bigint NOT NULL,
    state text NOT NULL,
    reason text,
    lease text,
    consumer text NOT NULL,
    request_id text,
    epoch bigint NOT NULL,
    ttl_s bigint NOT NULL,
    expires_us bigint,
    attempt bigint NOT NULL,
    failed_deliveries bigint NOT NULL,
    step bigint,
    group_count bigint NOT NULL,
    rollout_count bigint NOT NULL,
    sample_count bigint NOT NULL,
    token_count bigint NOT NULL,
    loss_weighting text NOT NULL,
    loss_constant double precision NOT NULL,
    weight_samples bigint NOT NULL,
    weight_tokens bigint NOT NULL,
    version_current bigint NOT NULL,
    version_min bigint,
    version_max bigint,
    metrics text NOT NULL,
    live_bytes bigint NOT NULL,
    created_us bigint NOT NULL,
    acked_us bigint,
    CONSTRAINT batch_check CHECK (((state = 'leased'::text) = (expires_us IS NOT NULL))),
    CONSTRAINT batch_state_check CHECK ((state = ANY (ARRAY['leased'::text, 'returned'::text, 'trained'::text, 'checkpointed'::text, 'quarantined'::text, 'split'::text, 'discarded'::text])))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.02');
ALTER TABLE public.batch ALTER COLUMN batch_pk ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.batch_batch_pk_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.batch_group (
    batch_pk bigint NOT NULL,
    place bigint NOT NULL,
    group_pk bigint NOT NULL
);
CREATE TABLE public.payload (
    rollout_pk bigint NOT NULL,
    codec bigint NOT NULL,
    digest bytea NOT NULL,
    body bytea NOT NULL
);
ALTER TABLE ONLY public.payload ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE public.policy (
    policy_pk bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    rules_pk bigint NOT NULL,
    run bigint NOT NULL,
    epoch bigint NOT NULL,
    version bigint NOT NULL,
    version_step bigint,
    version_uri text,
    acked_step bigint,
    checkpoint_step bigint,
    tally_mark text NOT NULL,
    created_us bigint NOT NULL
);
ALTER TABLE public.policy ALTER COLUMN policy_pk ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.policy_policy_pk_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE SEQUENCE public.ready_sequence
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE public.recent (
    policy_pk bigint NOT NULL,
    minute bigint NOT NULL,
    name text NOT NULL,
    slot bigint NOT NULL,
    value bigint NOT NULL
);
CREATE TABLE public.rollout (
    rollout_pk bigint NOT NULL,
    policy_pk bigint NOT NULL,
    run bigint NOT NULL,
    rollout_key bytea NOT NULL,
    rollout_id text NOT NULL,
    group_pk bigint NOT NULL,
    verdict text NOT NULL,
    reason text,
    failed_filters text,
    reward double precision,
    advantage double precision,
    content_digest bytea NOT NULL,
    policy_version bigint NOT NULL,
    version_assumed bigint NOT NULL,
    version_min bigint,
    version_max bigint,
    segments bigint NOT NULL,
    trained_segments bigint NOT NULL,
    tokens bigint NOT NULL,
    trained_tokens bigint NOT NULL,
    unpacked_bytes bigint NOT NULL,
    received_us bigint NOT NULL,
    CONSTRAINT rollout_verdict_check CHECK ((verdict = ANY (ARRAY['kept'::text, 'masked'::text, 'dropped'::text, 'late'::text])))
);
CREATE TABLE public.rollout_group (
    group_pk bigint NOT NULL,
    policy_pk bigint NOT NULL,
    run bigint NOT NULL,
    group_key bytea NOT NULL,
    group_id text NOT NULL,
    rules_pk bigint NOT NULL,
    environment text,
    state text NOT NULL,
    reason text,
    failed_filters text,
    size bigint NOT NULL,
    min_size bigint NOT NULL,
    kept bigint NOT NULL,
    masked bigint NOT NULL,
    dropped bigint NOT NULL,
    late bigint NOT NULL,
    payload_bytes bigint NOT NULL,
    opened_us bigint NOT NULL,
    deadline_us bigint,
    decided_us bigint,
    ready_seq bigint,
    samples bigint NOT NULL,
    trained_samples bigint NOT NULL,
    tokens bigint NOT NULL,
    trained_tokens bigint NOT NULL,
    reward_sum double precision NOT NULL,
    reward_count bigint NOT NULL,
    version_min bigint,
    version_max bigint,
    failed_deliveries bigint NOT NULL,
    delivered bigint NOT NULL,
    batch_pk bigint,
    purge_us bigint,
    purged_us bigint,
    forget_us bigint,
    CONSTRAINT rollout_group_check CHECK (((state = 'open'::text) = (deadline_us IS NOT NULL))),
    CONSTRAINT rollout_group_check1 CHECK (((state <> 'ready'::text) OR (ready_seq IS NOT NULL))),
    CONSTRAINT rollout_group_check2 CHECK (((state <> 'batched'::text) OR (batch_pk IS NOT NULL))),
    CONSTRAINT rollout_group_state_check CHECK ((state = ANY (ARRAY['open'::text, 'ready'::text, 'batched'::text, 'stale'::text, 'discarded'::text, 'quarantined'::text])))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.02');
ALTER TABLE public.rollout_group ALTER COLUMN group_pk ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.rollout_group_group_pk_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
ALTER TABLE public.rollout ALTER COLUMN rollout_pk ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.rollout_rollout_pk_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.rules (
    rules_pk bigint NOT NULL,
    body text NOT NULL,
    created_us bigint NOT NULL
);
ALTER TABLE public.rules ALTER COLUMN rules_pk ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.rules_rules_pk_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.tally (
    policy_pk bigint NOT NULL,
    name text NOT NULL,
    slot bigint NOT NULL,
    value bigint NOT NULL,
    amount double precision NOT NULL,
    latest_us bigint NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.02');
CREATE TABLE public.version (
    policy_pk bigint NOT NULL,
    version bigint NOT NULL,
    step bigint,
    uri text,
    published_us bigint NOT NULL
);
INSERT INTO public._sqlx_migrations VALUES (1, 'ledger', '2026-11-21 09:18:48.984643+00', true, '\x28a9fb4323c1c4539df75724fc8cf128f52c5c064c909ec7158fa9240a656fe63d25038af6b4cf25ffa60df9630d5a1e', 130891987);
INSERT INTO public.batch OVERRIDING SYSTEM VALUE VALUES (1, '\x01a1fd66b56d70a3a42718dbfb4ad553', 1, 1, 'checkpointed', NULL, '52690c82534448799ae6c0f02e2aa244', 'fixture', 'settled', 0, 86400, NULL, 1, 0, 1, 1, 2, 4, 14, 'rollout_mean', 1, 4, 8, 0, 0, 1, '{"reward/all":0.625,"reward/trained":0.625,"staleness/max":0.0,"staleness/mean":0.0}', 654, 1795252729196900, 1795252729205232);
INSERT INTO public.batch OVERRIDING SYSTEM VALUE VALUES (2, '\x01a1fd66b5af769a8d15eb1c46400e90', 1, 1, 'trained', NULL, 'fcd30ce57b8d411e90c95b9b4901eb74', 'fixture', 'trained', 0, 86400, NULL, 1, 0, 2, 1, 2, 4, 14, 'rollout_mean', 1, 4, 8, 1, 0, 1, '{"reward/all":0.625,"reward/trained":0.625,"staleness/max":1.0,"staleness/mean":1.0}', 654, 1795252729263528, 1795252729290425);
INSERT INTO public.batch OVERRIDING SYSTEM VALUE VALUES (3, '\x01a1fd66b5e5705bb5451a8ccae21271', 1, 1, 'leased', NULL, '37b5bea10f45489b92dc46a564218624', 'fixture', 'leased', 0, 86400, 1795339129316906, 1, 0, NULL, 1, 2, 4, 14, 'rollout_mean', 1, 4, 8, 1, 0, 1, '{"reward/all":0.625,"reward/trained":0.625,"staleness/max":1.0,"staleness/mean":1.0}', 654, 1795252729316906, NULL);
INSERT INTO public.batch_group VALUES (1, 0, 1);
INSERT INTO public.batch_group VALUES (2, 0, 2);
INSERT INTO public.batch_group VALUES (3, 0, 3);
INSERT INTO public.payload VALUES (1, 1, '\xe10475a159cedf613a31251d34d21975cd810dad268810052705a5fb58e28018', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aac844f8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (2, 1, '\x7fe49da9d902fe752c4b34adfe4a06ba8927211738209f5574082f8214c9688f', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aa403df8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (3, 1, '\xe10475a159cedf613a31251d34d21975cd810dad268810052705a5fb58e28018', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aac844f8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (4, 1, '\x7fe49da9d902fe752c4b34adfe4a06ba8927211738209f5574082f8214c9688f', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aa403df8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (5, 1, '\xe10475a159cedf613a31251d34d21975cd810dad268810052705a5fb58e28018', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aac844f8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (6, 1, '\x7fe49da9d902fe752c4b34adfe4a06ba8927211738209f5574082f8214c9688f', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aa403df8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (7, 1, '\xe10475a159cedf613a31251d34d21975cd810dad268810052705a5fb58e28018', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aac844f8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (8, 1, '\x7fe49da9d902fe752c4b34adfe4a06ba8927211738209f5574082f8214c9688f', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aa403df8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (9, 1, '\xe10475a159cedf613a31251d34d21975cd810dad268810052705a5fb58e28018', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aac844f8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (10, 1, '\xe10475a159cedf613a31251d34d21975cd810dad268810052705a5fb58e28018', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aac844f8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (11, 1, '\x7fe49da9d902fe752c4b34adfe4a06ba8927211738209f5574082f8214c9688f', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aa403df8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.payload VALUES (12, 1, '\x7142af9fac64a1ff798ba04ddb1630e2fecc6ab19839e69846cbbe7e5af6a29e', '\x28b52ffd600101ed0900f656472d70499a0e6c876a5555551d6e2484fede76b4bd7753eddb2fcdeef64ee92aecea88de36fc341355aa8054f8490a3a003b0039000cf43da3a5407ae3493c0e3e158525a9a70f5378289dd19cf530b5cf2f14ea7a98533c7d2354709fd717610387e1e9b0296bee390e4d0fd94884491e504024b93049ba3a94aea05a28a8ecd94447a08a1215343c81cd299ee49f6e7c92aecbbd434cfa2a43ed2a7b4650fac2a6cd3dcc29128ba702fb54e3520e4fdda518124f1b144ae153e383e9bbc0bd87e1d673215db7b967f53d0da46fd38683cfb717e1d317cd691c621843f719356bc5168e048f87078fc70382d826607b806d010edb0e073604db8811db016c03b09d601b899a68add8100b6bc59651d32072c985c9664925158649dfe69c0a000150017efdd80480214ea6c960679b317136607937be981bf25267');
INSERT INTO public.policy OVERRIDING SYSTEM VALUE VALUES (1, 'default', 2, 1, 0, 1, 1, 'file:///v1', 2, 1, '{"rewards":6,"reward_sum":3.75,"dropped":{}}', 1795252729123095);
INSERT INTO public.recent VALUES (1, 29920878, 'dropped.by-hand', 3, 1);
INSERT INTO public.recent VALUES (1, 29920878, 'dropped.no-reward', 13, 1);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (1, 1, 1, '\xbf2f8cf36b9d3de554f3f440882e767f', 'settled-0', 1, 'kept', NULL, NULL, 1, 0.7071054478557284, '\x8994380d4afd1728e4eb90d3b98eec3beea187aaa80ee91224672cfcefa1e178', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729157268);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (2, 1, 1, '\xdc6a805ec17ca2e241ceabe076a2c55c', 'settled-1', 1, 'kept', NULL, NULL, 0.25, -0.7071054478557284, '\xb29e9037660d07c33be27d16cb4b6541a6c91fb762040f5ee89416e2215ec058', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729157268);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (3, 1, 1, '\x6eaa8853ea5af1274ce15f28019cbfd3', 'trained-0', 2, 'kept', NULL, NULL, 1, 0.7071054478557284, '\x68e3a2d398ce936f33de8d4a2b4f086c9888bb5e4fc5814cc893918a5dddd911', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729246146);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (4, 1, 1, '\x5028f4604e2584ff7453454fa34446e2', 'trained-1', 2, 'kept', NULL, NULL, 0.25, -0.7071054478557284, '\x6134661f43736332ea7ae1aecfe89f0c4810bcc687b46e9cf19d9e7822e067d4', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729246146);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (5, 1, 1, '\x3b5c6fb24d1380e01598232ac90fe59a', 'leased-0', 3, 'kept', NULL, NULL, 1, 0.7071054478557284, '\x9b841c3c9ec6a99305cb3cea5f791589b4959a6d8c3710c1660c4a015489a320', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729307459);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (6, 1, 1, '\x540312e24411f6a7d87b92db2f5c6885', 'leased-1', 3, 'kept', NULL, NULL, 0.25, -0.7071054478557284, '\x24f9577ff71565d295ef48913b3655581716f6d5c6418ff4b952a6d834f5da5e', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729307459);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (7, 1, 1, '\xbd0668e1fbe69e01d4e17923dfaebc6f', 'ready-0', 4, 'kept', NULL, NULL, 1, 0.7071054478557284, '\x8e4c7b03bd21408681c93bb9c06231baea847af1e1a6c4b4707b282b41d8658a', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729337018);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (8, 1, 1, '\x4941cdb06a846c51ce926e360b70fae6', 'ready-1', 4, 'kept', NULL, NULL, 0.25, -0.7071054478557284, '\x4f809abeb542f0674800fc09a232bc74385497acdaa3db707365a15cdc83041e', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729337018);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (9, 1, 1, '\x8b6c0be9826fd42bee7a5125a97c9f27', 'open-0', 5, 'kept', NULL, NULL, 1, NULL, '\xa03caba0c8995797ebc9cd57d399176745440629536066ba19baff4e24e00fab', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729346329);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (10, 1, 1, '\x5f0809fd508635f32a72db7afcb70cfb', 'gone-0', 6, 'kept', NULL, NULL, 1, NULL, '\xb701eb02a9ce872488e5683ee462f688f8c1888d426216c8c3df861eb284f553', 0, 0, 0, 1, 2, 2, 7, 4, 513, 1795252729356450);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (11, 1, 1, '\x61f77396f4e56199437b352d31626d0d', 'noreward', 5, 'dropped', 'no-reward', NULL, NULL, NULL, '\x39e2884c812b745b08db0e9fd7322e54b62c908ee9c1c72af66af374dccffe15', 0, 0, NULL, NULL, 2, 2, 7, 4, 513, 1795252729386625);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (12, 1, 1, '\x49a78156ef12d3aeb19d146b0509a66f', 'ready-2', 4, 'late', 'group-decided', NULL, 1, NULL, '\x96c47359b72d38c3857681cab31836c54cbcab10e7ab7b1be0a8723c614ade90', 0, 0, NULL, NULL, 2, 2, 7, 4, 513, 1795252729402599);
INSERT INTO public.rollout_group OVERRIDING SYSTEM VALUE VALUES (6, 1, 1, '\xafae16e5c35fafc0bb2c5333310842c4', 'gone', 2, 'fixture', 'discarded', 'fixture', NULL, 2, 2, 1, 0, 0, 0, 327, 1795252729356450, NULL, 1795252729376313, NULL, 0, 0, 0, 0, 0, 0, NULL, NULL, 0, 0, NULL, 2110612729376313, NULL, NULL);
INSERT INTO public.rollout_group OVERRIDING SYSTEM VALUE VALUES (1, 1, 1, '\x2e78833002ec99a9f3b90a521a0eb59b', 'settled', 2, 'fixture', 'batched', NULL, NULL, 2, 2, 2, 0, 0, 0, 654, 1795252729157268, NULL, 1795252729157268, 1, 4, 4, 14, 8, 1.25, 2, 0, 1, 0, 1, 1, 2110612729216406, NULL, NULL);
INSERT INTO public.rollout_group OVERRIDING SYSTEM VALUE VALUES (5, 1, 1, '\xa1a614136bd7aa340fee5a62b4591b25', 'open', 2, 'fixture', 'open', NULL, NULL, 2, 2, 1, 0, 1, 0, 327, 1795252729346329, 1795256329346329, NULL, NULL, 0, 0, 0, 0, 0, 0, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL);
INSERT INTO public.rollout_group OVERRIDING SYSTEM VALUE VALUES (2, 1, 1, '\x7d952093db9178add14bec7dfdcb7d05', 'trained', 2, 'fixture', 'batched', NULL, NULL, 2, 2, 2, 0, 0, 0, 654, 1795252729246146, NULL, 1795252729246146, 2, 4, 4, 14, 8, 1.25, 2, 0, 1, 0, 1, 2, 2110612729290425, NULL, NULL);
INSERT INTO public.rollout_group OVERRIDING SYSTEM VALUE VALUES (4, 1, 1, '\x4b65ad37c49a9f86adf87ef41dc66131', 'ready', 2, 'fixture', 'ready', NULL, NULL, 2, 2, 2, 0, 0, 1, 654, 1795252729337018, NULL, 1795252729337018, 4, 4, 4, 14, 8, 1.25, 2, 0, 1, 0, 0, NULL, NULL, NULL, NULL);
INSERT INTO public.rollout_group OVERRIDING SYSTEM VALUE VALUES (3, 1, 1, '\x30a3c6d99534ad04c67905939aab373c', 'leased', 2, 'fixture', 'batched', NULL, NULL, 2, 2, 2, 0, 0, 0, 654, 1795252729307459, NULL, 1795252729307459, 3, 4, 4, 14, 8, 1.25, 2, 0, 1, 0, 1, 3, NULL, NULL, NULL);
INSERT INTO public.rules OVERRIDING SYSTEM VALUE VALUES (1, '{"require":["tokens"],"group":{"size":1,"timeout_s":3600,"on_drop":"refill"},"batch":{"groups":1,"order":"fifo"},"lease":{"ttl_s":600,"max_deliveries":5},"advantage":"grpo","loss_weighting":"rollout_mean","staleness":{"action":"drop"},"backlog":{"max_ready_rollouts":65536,"max_bytes":8589934592},"settle":"checkpoint","retention":{"trained_s":604800,"settled_s":3600,"dropped_s":0,"tombstone_s":604800},"filter":[]}', 1795252729123095);
INSERT INTO public.rules OVERRIDING SYSTEM VALUE VALUES (2, '{"require":["tokens"],"group":{"size":2,"timeout_s":3600,"on_drop":"refill"},"batch":{"groups":1,"order":"fifo"},"lease":{"ttl_s":86400,"max_deliveries":5},"advantage":"grpo","loss_weighting":"rollout_mean","staleness":{"action":"drop"},"backlog":{"max_ready_rollouts":65536,"max_bytes":8589934592},"settle":"checkpoint","retention":{"trained_s":315360000,"settled_s":315360000,"dropped_s":315360000,"tombstone_s":315360000},"filter":[]}', 1795252729131435);
INSERT INTO public.tally VALUES (1, 'group.open', 5, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 5, 654, 0, 0);
INSERT INTO public.tally VALUES (1, 'received', 5, 2, 0, 1795252729157268);
INSERT INTO public.tally VALUES (1, 'reward', 5, 2, 1.25, 0);
INSERT INTO public.tally VALUES (1, 'rollout.open', 5, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.batched', 11, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.ready', 11, -1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.ready', 11, -2, 0, 0);
INSERT INTO public.tally VALUES (1, 'batch.leased', 0, -1, 0, 0);
INSERT INTO public.tally VALUES (1, 'batch.trained', 0, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.leased', 0, -2, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.trained', 0, 2, 0, 0);
INSERT INTO public.tally VALUES (1, 'batch.checkpointed', 11, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.checkpointed', 11, 2, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.open', 13, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.ready', 13, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 13, 654, 0, 0);
INSERT INTO public.tally VALUES (1, 'reward', 13, 2, 1.25, 0);
INSERT INTO public.tally VALUES (1, 'rollout.open', 13, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.ready', 13, 2, 0, 0);
INSERT INTO public.tally VALUES (1, 'batch.leased', 5, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.batched', 5, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.ready', 5, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.leased', 5, 2, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.ready', 5, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'batch.leased', 11, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'batch.trained', 11, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 11, -654, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.leased', 11, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.trained', 11, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.open', 10, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.ready', 10, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 10, 654, 0, 0);
INSERT INTO public.tally VALUES (1, 'received', 10, 2, 0, 1795252729307459);
INSERT INTO public.tally VALUES (1, 'reward', 10, 2, 1.25, 0);
INSERT INTO public.tally VALUES (1, 'rollout.open', 10, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.ready', 10, 2, 0, 0);
INSERT INTO public.tally VALUES (1, 'batch.leased', 9, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.batched', 9, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.ready', 9, -1, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 0, 327, 0, 0);
INSERT INTO public.tally VALUES (1, 'received', 13, 3, 0, 1795252729386625);
INSERT INTO public.tally VALUES (1, 'received', 8, 1, 0, 1795252729402599);
INSERT INTO public.tally VALUES (1, 'reward', 8, 1, 1, 0);
INSERT INTO public.tally VALUES (1, 'rollout.late', 8, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.leased', 9, 2, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.ready', 9, -2, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.open', 1, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 1, 327, 0, 0);
INSERT INTO public.tally VALUES (1, 'received', 1, 1, 0, 1795252729356450);
INSERT INTO public.tally VALUES (1, 'reward', 1, 1, 1, 0);
INSERT INTO public.tally VALUES (1, 'rollout.open', 1, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'dropped.no-reward', 13, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.dropped', 13, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.ready', 0, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.ready', 0, 2, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.open', 0, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'received', 0, 3, 0, 1795252729346329);
INSERT INTO public.tally VALUES (1, 'reward', 0, 3, 2.25, 0);
INSERT INTO public.tally VALUES (1, 'rollout.open', 0, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'dropped.by-hand', 3, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.discarded', 3, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.open', 3, -1, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 3, -327, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.discarded', 3, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.open', 3, -1, 0, 0);
INSERT INTO public.version VALUES (1, 1, 1, 'file:///v1', 1795252729232034);
SELECT pg_catalog.setval('public.batch_batch_pk_seq', 3, true);
SELECT pg_catalog.setval('public.policy_policy_pk_seq', 1, true);
SELECT pg_catalog.setval('public.ready_sequence', 4, true);
SELECT pg_catalog.setval('public.rollout_group_group_pk_seq', 6, true);
SELECT pg_catalog.setval('public.rollout_rollout_pk_seq', 12, true);
SELECT pg_catalog.setval('public.rules_rules_pk_seq', 2, true);
ALTER TABLE ONLY public._sqlx_migrations
    ADD CONSTRAINT _sqlx_migrations_pkey PRIMARY KEY (version);
ALTER TABLE ONLY public.batch
    ADD CONSTRAINT batch_batch_id_key UNIQUE (batch_id);
ALTER TABLE ONLY public.batch_group
    ADD CONSTRAINT batch_group_pkey PRIMARY KEY (batch_pk, place);
ALTER TABLE ONLY public.batch
    ADD CONSTRAINT batch_pkey PRIMARY KEY (batch_pk);
ALTER TABLE ONLY public.payload
    ADD CONSTRAINT payload_pkey PRIMARY KEY (rollout_pk);
ALTER TABLE ONLY public.policy
    ADD CONSTRAINT policy_name_key UNIQUE (name);
ALTER TABLE ONLY public.policy
    ADD CONSTRAINT policy_pkey PRIMARY KEY (policy_pk);
ALTER TABLE ONLY public.recent
    ADD CONSTRAINT recent_pkey PRIMARY KEY (policy_pk, minute, name, slot);
ALTER TABLE ONLY public.rollout_group
    ADD CONSTRAINT rollout_group_pkey PRIMARY KEY (group_pk);
ALTER TABLE ONLY public.rollout_group
    ADD CONSTRAINT rollout_group_policy_pk_run_group_key_key UNIQUE (policy_pk, run, group_key);
ALTER TABLE ONLY public.rollout
    ADD CONSTRAINT rollout_pkey PRIMARY KEY (rollout_pk);
ALTER TABLE ONLY public.rollout
    ADD CONSTRAINT rollout_policy_pk_run_rollout_key_key UNIQUE (policy_pk, run, rollout_key);
ALTER TABLE ONLY public.rules
    ADD CONSTRAINT rules_pkey PRIMARY KEY (rules_pk);
ALTER TABLE ONLY public.tally
    ADD CONSTRAINT tally_pkey PRIMARY KEY (policy_pk, name, slot);
ALTER TABLE ONLY public.version
    ADD CONSTRAINT version_pkey PRIMARY KEY (policy_pk, version);
CREATE INDEX batch_by_expiry ON public.batch USING btree (expires_us) WHERE (expires_us IS NOT NULL);
CREATE INDEX batch_by_policy ON public.batch USING btree (policy_pk, run, state, step);
CREATE INDEX batch_group_by_group ON public.batch_group USING btree (group_pk);
CREATE INDEX recent_by_minute ON public.recent USING btree (minute);
CREATE INDEX rollout_by_group ON public.rollout USING btree (group_pk, rollout_pk);
CREATE INDEX rollout_by_policy ON public.rollout USING btree (policy_pk, rollout_pk);
CREATE INDEX rollout_group_batch ON public.rollout_group USING btree (batch_pk) WHERE (batch_pk IS NOT NULL);
CREATE INDEX rollout_group_by_policy ON public.rollout_group USING btree (policy_pk, group_pk);
CREATE INDEX rollout_group_deadline ON public.rollout_group USING btree (deadline_us) WHERE (deadline_us IS NOT NULL);
CREATE INDEX rollout_group_forget ON public.rollout_group USING btree (forget_us) WHERE (forget_us IS NOT NULL);
CREATE INDEX rollout_group_open ON public.rollout_group USING btree (policy_pk, run) WHERE (state = 'open'::text);
CREATE INDEX rollout_group_purge ON public.rollout_group USING btree (purge_us) WHERE (purge_us IS NOT NULL);
CREATE INDEX rollout_group_ready ON public.rollout_group USING btree (policy_pk, run, ready_seq) WHERE (state = 'ready'::text);
ALTER TABLE ONLY public.batch_group
    ADD CONSTRAINT batch_group_batch_pk_fkey FOREIGN KEY (batch_pk) REFERENCES public.batch(batch_pk);
ALTER TABLE ONLY public.batch_group
    ADD CONSTRAINT batch_group_group_pk_fkey FOREIGN KEY (group_pk) REFERENCES public.rollout_group(group_pk);
ALTER TABLE ONLY public.batch
    ADD CONSTRAINT batch_policy_pk_fkey FOREIGN KEY (policy_pk) REFERENCES public.policy(policy_pk);
ALTER TABLE ONLY public.payload
    ADD CONSTRAINT payload_rollout_pk_fkey FOREIGN KEY (rollout_pk) REFERENCES public.rollout(rollout_pk);
ALTER TABLE ONLY public.policy
    ADD CONSTRAINT policy_rules_pk_fkey FOREIGN KEY (rules_pk) REFERENCES public.rules(rules_pk);
ALTER TABLE ONLY public.rollout_group
    ADD CONSTRAINT rollout_group_batch_pk_fkey FOREIGN KEY (batch_pk) REFERENCES public.batch(batch_pk);
ALTER TABLE ONLY public.rollout
    ADD CONSTRAINT rollout_group_pk_fkey FOREIGN KEY (group_pk) REFERENCES public.rollout_group(group_pk);
ALTER TABLE ONLY public.version
    ADD CONSTRAINT version_policy_pk_fkey FOREIGN KEY (policy_pk) REFERENCES public.policy(policy_pk);
