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
CREATE TABLE public.access_key (
    key_pk bigint NOT NULL,
    key_id text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL,
    role text NOT NULL,
    policies text NOT NULL,
    hash bytea NOT NULL,
    created_us bigint NOT NULL,
    expires_us bigint,
    last_used_us bigint,
    revoked_us bigint,
    CONSTRAINT access_key_role_check CHECK ((role = ANY (ARRAY['produce'::text, 'train'::text, 'read'::text, 'admin'::text])))
);
ALTER TABLE public.access_key ALTER COLUMN key_pk ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.access_key_key_pk_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.admission (
    admission_pk bigint NOT NULL,
    admission_id bytea NOT NULL,
    policy_pk bigint NOT NULL,
    granted bigint NOT NULL,
    used bigint NOT NULL,
    version bigint NOT NULL,
    expires_us bigint NOT NULL,
    CONSTRAINT admission_check CHECK (((used >= 0) AND (used <= granted)))
);
ALTER TABLE public.admission ALTER COLUMN admission_pk ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.admission_admission_pk_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
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
    resumes bigint DEFAULT 0 NOT NULL,
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
    created_us bigint NOT NULL,
    steps_known bigint DEFAULT 0 NOT NULL,
    restored_epoch bigint
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
    trained_spans text,
    seal bytea,
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
    mask_below bigint,
    seal bytea,
    resumes bigint DEFAULT 0 NOT NULL,
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
CREATE TABLE public.service_clock (
    only_row bigint NOT NULL,
    offset_us bigint NOT NULL,
    latest_us bigint NOT NULL,
    asked bigint NOT NULL,
    answered bigint NOT NULL,
    CONSTRAINT service_clock_only_row_check CHECK ((only_row = 1))
)
WITH (fillfactor='50');
CREATE TABLE public.tally (
    policy_pk bigint NOT NULL,
    name text NOT NULL,
    slot bigint NOT NULL,
    value bigint NOT NULL,
    amount double precision NOT NULL,
    latest_us bigint NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.02');
CREATE TABLE public.tally_change (
    xid bigint DEFAULT ((pg_current_xact_id())::text)::bigint NOT NULL,
    policy_pk bigint NOT NULL,
    name text NOT NULL,
    value bigint NOT NULL,
    amount double precision NOT NULL,
    latest_us bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='10000');
CREATE TABLE public.tally_folded (
    only_row bigint NOT NULL,
    below bigint NOT NULL,
    CONSTRAINT tally_folded_only_row_check CHECK ((only_row = 1))
)
WITH (fillfactor='50');
CREATE VIEW public.tally_now AS
 SELECT tally.policy_pk,
    tally.name,
    tally.value,
    tally.amount,
    tally.latest_us
   FROM public.tally
UNION ALL
 SELECT tally_change.policy_pk,
    tally_change.name,
    tally_change.value,
    tally_change.amount,
    tally_change.latest_us
   FROM public.tally_change
  WHERE ((tally_change.xid >= ( SELECT COALESCE(max(tally_folded.below), (0)::bigint) AS "coalesce"
           FROM public.tally_folded)) AND (tally_change.xid < '9223372036854775807'::bigint));
CREATE TABLE public.version (
    policy_pk bigint NOT NULL,
    version bigint NOT NULL,
    step bigint,
    uri text,
    published_us bigint NOT NULL
);
INSERT INTO public._sqlx_migrations VALUES (1, 'ledger', '2026-11-22 10:11:15.735337+00', true, '\x28a9fb4323c1c4539df75724fc8cf128f52c5c064c909ec7158fa9240a656fe63d25038af6b4cf25ffa60df9630d5a1e', 688984838);
INSERT INTO public._sqlx_migrations VALUES (2, 'overload', '2026-11-22 10:11:15.735337+00', true, '\xf065b3e04880d7dd3a40853b0ccc582d1e271613b2af85bdc6bfa4e0ee61f40462e25476a76d010b545b0bc5ab60fc56', 101980573);
INSERT INTO public._sqlx_migrations VALUES (3, 'keys', '2026-11-22 10:11:15.735337+00', true, '\xfcfcb6716cec9f01c7a438f6d7233db98633e7497a85f4ad63cc46c10370876b5485e8ffda88fc074762fd9b11e2f33c', 61840151);
INSERT INTO public._sqlx_migrations VALUES (4, 'seals', '2026-11-22 10:11:15.735337+00', true, '\x7945a0d1524b1af291c6c6fae4c4db20c84ee77ec175ba31db7c31da9f8260868ef9ba6a712cf7e5ecba7ad9cbd8f9e0', 14055630);
INSERT INTO public._sqlx_migrations VALUES (5, 'orders', '2026-11-22 10:11:15.735337+00', true, '\x119886114af16eb7e52ad4bf75275dd365c7aa0bce8e5abe501e60f8b0fc0f667021b44f1f168f1d4e449fe0635910c9', 50015423);
INSERT INTO public._sqlx_migrations VALUES (7, 'lineage and clock', '2026-11-22 10:11:15.735337+00', true, '\xb376265deadf04c06d0eef5ab8ce34ae8ee0f3c44d5e3f57f4348892ee432de42305c212b2ca09e6aa4f3eb74f213c31', 41262366);
INSERT INTO public._sqlx_migrations VALUES (10, 'tally changes', '2026-11-22 10:11:15.735337+00', true, '\x478b753beebb2625d170e38863eadfb7a1caf1d8f5b4fac8fb2f2e6a75bfa365dad40fd654fd02a26194f9a9d3b7f5b0', 67842135);
INSERT INTO public._sqlx_migrations VALUES (11, 'restored epoch', '2026-11-22 10:11:15.735337+00', true, '\x6ab26289d2c119c7f525c007217c8d38fa53960f10b2b90fcf15e519838d053534daf526b20b1b625359e3e8d2507c27', 7261933);
INSERT INTO public.batch OVERRIDING SYSTEM VALUE VALUES (1, '\x01a202bd1d8974a2b728b52070338e7d', 1, 1, 'leased', NULL, 'cc16557be02f4e65a63302547c09113e', 'fixture', 'fixture', 0, 86400, 1795428678017014, 1, 0, NULL, 1, 3, 4, 15, 'rollout_mean', 1, 4, 6, 0, 0, 1, '{"dropped/infra":1.0,"reward/all":0.35,"reward/trained":0.625,"staleness/max":0.0,"staleness/mean":0.0}', 862, 1795342278017014, NULL, 0);
INSERT INTO public.batch_group VALUES (1, 0, 2);
INSERT INTO public.payload VALUES (3, 1, '\x4e62a5fc6ab2670a02b56fd6200798f3ab8d798e994384ae43dc145efb9ce704', '\x28b52ffd6076018d0c00d69b563160499b0e208201e8300cc3609b501107117959dbed161aadc9fffbd5133804ad58d0301a3ea5901c485907675934222203480045004800b11dbb474dafb170c0b680e1f5629c7d44b1b0307b6a41bdbe324bb30d323571dfda435c2451538bd73bb859a2a6d7f83e56dd3a5ecfb06a06d1e3fb763cb9072307c7b7321108045cc1662a499563aa581ca6cdc3f6edd6be7573b4e6e90a5d676086a914349cb57b8d333de4589ded597af0d6b38f0c6931f274bd98a5d9c78edc57c5c2ecbb4df03d6eed03cc95d41cae1ca5f658406e6834ee2b57b0f791f1200579d235b1e7e81e15195e15f6d171e4f5f50e56fdbdc345915bcf04e178bd2e8bed1b67ca30185828a05048380ddb33ce140a071e32116426c4034982498483c924425152194065a680cc0c20c94cc9432644662aa9642680cc4cc84c84cc542ee84a3809bd9c7de46ec05838a22b0439da68f328d428a3ccf3eca37b51840113005974001f3bc2189030056232289ec0c80c1090079c1756c6b51bd230a4c83434d8d991ec0d3bb4a8c15e46c430670d792933');
INSERT INTO public.payload VALUES (4, 1, '\xdf624a763ac383354e35f339638e4368547343b4b5017e876a4b4c4962c671d8', '\x28b52ffd604100c50600a24f2f2580a9e9445114058738065a226db1f7deed1d048534528f323a5d101ffa974e06cb1f2349010ddb0d083bc2f6e1c3b680ed00db00b68f67e13948d7dc0705a230ac31fa321b858ca354850cc8cb8604738fb2799bae8af6dcd2d411427a2a6b4ef31d25a42bcb455b85318b3b0a6b49c545053797e682aab98e1e275d97256b6eb504511e3ae43b7a1204e90b87b8b647060589f47ccde24bb772efa42f8c516ea11e5dc9c584356f9faecde2ea91520d4b5f968bb5c73058deb18f8108000c538a4c9360e7863c89896a9019c25f63f2d18d6206');
INSERT INTO public.payload VALUES (5, 1, '\xb309bbf5a55d12d5ff280dc6d9a0aba61174786d041e51575e2de056bae857ca', '\x28b52ffd603e00bd0600720f2f2580a9e92631129b47180c2d91b6d87bef3e4562b259528f323a5d101ffa97ee633e0523490110b6211eec08db870fdb02b6036c03d83e9e85e7205d731d1448b2b0b6e8cb6c14368e52153290970c0bcc3dcae66dba2ada734a534708e9a9ac39cd779490ae2c99b6095b983b0a4b49c5c5043797a682aab98e1e275d97256b6eb505923c6cc877f42408d21987b8b647060589f47ccde24bb772efa42b6c516ea11e3d49b520e3e9da2cae1e29d5b0f465b9587b4b83e51dfb180808000c538a4c9360e7863c89896a9019c22f63f2ce8d6206');
INSERT INTO public.policy OVERRIDING SYSTEM VALUE VALUES (1, 'default', 2, 1, 0, 0, NULL, NULL, NULL, NULL, '{"rewards":5,"reward_sum":1.75,"dropped":{"infra":1}}', 1795342276924777, 0, NULL);
INSERT INTO public.recent VALUES (1, 29922371, 'dropped.infra', 1, 1);
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (2, 1, 1, '\xc13a25d56b07218962cd4d531d313d2a', 'aborted', 2, 'dropped', 'infra', NULL, 0, NULL, '\x11eab26f73977e3b6e3493399baa60f923949acdedcb488dc4fe5370d734e64d', 0, 1, NULL, NULL, 1, 1, 4, 2, 319, 1795342277387003, NULL, '\x5e01605e1e1fe72cb66eb89a60928ad5');
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (5, 1, 1, '\xd870b786a9622723a593e11de1164dc3', 'failed', 2, 'kept', NULL, NULL, 0.25, -0.3202556922267414, '\xaa1e798cba051caef09c744d7431e3640e0876cac55fd29e0f9e092be0fff20f', 0, 1, 0, 0, 1, 1, 4, 2, 318, 1795342277821140, '[[0,0,2]]', '\x1708603e9411809f80d24b03789bdb9a');
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (3, 1, 1, '\x81b856958cd28b17a7902af7f2596817', 'completed', 2, 'kept', NULL, NULL, 1, 1.1208949227935947, '\x372ea1ceb069dacf6585bae3d1e25a17546312f1ec07afee692b2ec8b03e7ecf', 0, 0, 0, 1, 2, 2, 7, 4, 630, 1795342277591532, '[[0,0,1],[0,1,1],[1,0,2]]', '\xcc26772bd5aca95a7491ae43e15bb727');
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (4, 1, 1, '\x6fbe487669fcb38a23d5ae6ce898323f', 'truncated', 2, 'masked', 'cut', NULL, 0, -0.8006392305668535, '\x2e7068a52c1c8e51016a29ecceea83400fe1fdb5ad0c84512ea52fc82241ef91', 0, 1, NULL, NULL, 1, 1, 4, 2, 321, 1795342277729542, NULL, '\x137a5a4bc4bb90aca68463205cdfa548');
INSERT INTO public.rollout OVERRIDING SYSTEM VALUE VALUES (6, 1, 1, '\x9c67b6e10f1b64c9a0a76c489761a8b6', 'late', 2, 'late', 'group-decided', NULL, 0.5, NULL, '\x6436011ddcd20f86ac33615cd20d6ab2be4e6643814dcd4bdb40deb0fd4f3000', 0, 1, NULL, NULL, 1, 1, 4, 2, 321, 1795342277955978, NULL, '\xfb05de2148e3925093a9d74b34d6667b');
INSERT INTO public.rollout_group OVERRIDING SYSTEM VALUE VALUES (2, 1, 1, '\x4d167f04fb1ec2a23989900293fc1ba3', 'group', 2, NULL, 'batched', NULL, NULL, 3, 3, 2, 1, 1, 1, 862, 1795342277387003, NULL, 1795342277821140, 1, 4, 4, 15, 6, 1.25, 2, 0, 1, 0, 1, 1, NULL, NULL, NULL, NULL, '\x95f8ca5cd42926b67e2f6db0ea9f5b5a', 0);
INSERT INTO public.rules OVERRIDING SYSTEM VALUE VALUES (1, '{"require":["tokens"],"group":{"size":1,"timeout_s":3600,"on_drop":"refill"},"batch":{"groups":1,"order":"fifo"},"lease":{"ttl_s":600,"max_deliveries":5,"max_resumes":20},"advantage":"grpo","loss_weighting":"rollout_mean","staleness":{"action":"drop"},"backlog":{"max_ready_rollouts":65536,"max_bytes":8589934592},"settle":"checkpoint","retention":{"trained_s":604800,"settled_s":3600,"dropped_s":0,"tombstone_s":604800},"filter":[]}', 1795342276924777);
INSERT INTO public.rules OVERRIDING SYSTEM VALUE VALUES (2, '{"require":[],"group":{"size":3,"timeout_s":3600,"on_drop":"refill"},"batch":{"groups":1,"order":"fifo"},"lease":{"ttl_s":86400,"max_deliveries":5,"max_resumes":20},"advantage":"grpo","loss_weighting":"rollout_mean","staleness":{"max":8,"action":"mask"},"backlog":{"max_ready_rollouts":65536,"max_bytes":8589934592},"settle":"checkpoint","retention":{"trained_s":604800,"settled_s":3600,"dropped_s":0,"tombstone_s":604800},"filter":[{"name":"cut","scope":"rollout","when":"status == \"truncated\"","action":"mask"},{"name":"infra","scope":"rollout","when":"status == \"aborted\"","action":"drop"}]}', 1795342277131930);
INSERT INTO public.service_clock VALUES (1, 0, 1795342278169719, 0, 0);
INSERT INTO public.tally VALUES (1, 'dropped.infra', 0, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.dropped', 0, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'assumed_version', 0, 3, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.open', 0, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'group.ready', 0, 1, 0, 0);
INSERT INTO public.tally VALUES (1, 'live_bytes', 0, 862, 0, 0);
INSERT INTO public.tally VALUES (1, 'received', 0, 4, 0, 1795342277821140);
INSERT INTO public.tally VALUES (1, 'reward', 0, 4, 1.25, 0);
INSERT INTO public.tally VALUES (1, 'rollout.open', 0, 0, 0, 0);
INSERT INTO public.tally VALUES (1, 'rollout.ready', 0, 3, 0, 0);
INSERT INTO public.tally_change VALUES (747, 1, 'assumed_version', 1, 0, 0);
INSERT INTO public.tally_change VALUES (747, 1, 'received', 1, 0, 1795342277955978);
INSERT INTO public.tally_change VALUES (747, 1, 'reward', 1, 0.5, 0);
INSERT INTO public.tally_change VALUES (747, 1, 'rollout.late', 1, 0, 0);
INSERT INTO public.tally_change VALUES (748, 1, 'batch.leased', 1, 0, 0);
INSERT INTO public.tally_change VALUES (748, 1, 'group.batched', 1, 0, 0);
INSERT INTO public.tally_change VALUES (748, 1, 'group.ready', -1, 0, 0);
INSERT INTO public.tally_change VALUES (748, 1, 'rollout.leased', 3, 0, 0);
INSERT INTO public.tally_change VALUES (748, 1, 'rollout.ready', -3, 0, 0);
INSERT INTO public.tally_folded VALUES (1, 744);
SELECT pg_catalog.setval('public.access_key_key_pk_seq', 1, false);
SELECT pg_catalog.setval('public.admission_admission_pk_seq', 1, false);
SELECT pg_catalog.setval('public.batch_batch_pk_seq', 1, true);
SELECT pg_catalog.setval('public.policy_policy_pk_seq', 1, true);
SELECT pg_catalog.setval('public.ready_sequence', 1, true);
SELECT pg_catalog.setval('public.rollout_group_group_pk_seq', 2, true);
SELECT pg_catalog.setval('public.rollout_rollout_pk_seq', 6, true);
SELECT pg_catalog.setval('public.rules_rules_pk_seq', 2, true);
ALTER TABLE ONLY public._sqlx_migrations
    ADD CONSTRAINT _sqlx_migrations_pkey PRIMARY KEY (version);
ALTER TABLE ONLY public.access_key
    ADD CONSTRAINT access_key_key_id_key UNIQUE (key_id);
ALTER TABLE ONLY public.access_key
    ADD CONSTRAINT access_key_pkey PRIMARY KEY (key_pk);
ALTER TABLE ONLY public.admission
    ADD CONSTRAINT admission_admission_id_key UNIQUE (admission_id);
ALTER TABLE ONLY public.admission
    ADD CONSTRAINT admission_pkey PRIMARY KEY (admission_pk);
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
ALTER TABLE ONLY public.service_clock
    ADD CONSTRAINT service_clock_pkey PRIMARY KEY (only_row);
ALTER TABLE ONLY public.tally_folded
    ADD CONSTRAINT tally_folded_pkey PRIMARY KEY (only_row);
ALTER TABLE ONLY public.tally
    ADD CONSTRAINT tally_pkey PRIMARY KEY (policy_pk, name, slot);
ALTER TABLE ONLY public.version
    ADD CONSTRAINT version_pkey PRIMARY KEY (policy_pk, version);
CREATE INDEX access_key_live ON public.access_key USING btree (key_pk) WHERE (revoked_us IS NULL);
CREATE INDEX admission_by_expiry ON public.admission USING btree (expires_us);
CREATE INDEX admission_by_policy ON public.admission USING btree (policy_pk, expires_us);
CREATE INDEX batch_by_expiry ON public.batch USING btree (expires_us) WHERE (expires_us IS NOT NULL);
CREATE INDEX batch_by_policy ON public.batch USING btree (policy_pk, run, state, step);
CREATE INDEX batch_group_by_group ON public.batch_group USING btree (group_pk);
CREATE INDEX batch_in_order ON public.batch USING btree (policy_pk, batch_pk);
CREATE INDEX batch_returned ON public.batch USING btree (policy_pk, run, COALESCE(step, '9223372036854775807'::bigint), batch_pk) WHERE (state = 'returned'::text);
CREATE INDEX recent_by_minute ON public.recent USING btree (minute);
CREATE INDEX rollout_by_group ON public.rollout USING btree (group_pk, rollout_pk);
CREATE INDEX rollout_by_policy ON public.rollout USING btree (policy_pk, rollout_pk);
CREATE INDEX rollout_group_batch ON public.rollout_group USING btree (batch_pk) WHERE (batch_pk IS NOT NULL);
CREATE INDEX rollout_group_by_policy ON public.rollout_group USING btree (policy_pk, group_pk);
CREATE INDEX rollout_group_deadline ON public.rollout_group USING btree (deadline_us) WHERE (deadline_us IS NOT NULL);
CREATE INDEX rollout_group_forget ON public.rollout_group USING btree (forget_us) WHERE (forget_us IS NOT NULL);
CREATE INDEX rollout_group_freshest ON public.rollout_group USING btree (policy_pk, run, COALESCE(version_min, '9223372036854775807'::bigint) DESC, ready_seq) WHERE (state = 'ready'::text);
CREATE INDEX rollout_group_open ON public.rollout_group USING btree (policy_pk, run) WHERE (state = 'open'::text);
CREATE INDEX rollout_group_purge ON public.rollout_group USING btree (purge_us) WHERE (purge_us IS NOT NULL);
CREATE INDEX rollout_group_ready ON public.rollout_group USING btree (policy_pk, run, ready_seq) WHERE (state = 'ready'::text);
CREATE INDEX tally_change_by_xid ON public.tally_change USING btree (xid);
ALTER TABLE ONLY public.admission
    ADD CONSTRAINT admission_policy_pk_fkey FOREIGN KEY (policy_pk) REFERENCES public.policy(policy_pk);
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
