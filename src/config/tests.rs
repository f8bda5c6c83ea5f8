//! Tests of valid configurations, and of the errors of invalid ones.

use super::*;

#[test]
fn nothing_needs_to_be_said() {
    let config = Config::parse("").expect("the defaults are valid");
    assert_eq!((config.listen.as_str(), config.database.reveal()), ("127.0.0.1:8080", "sqlite:data/forebay.db"));
}

#[test]
fn every_wrong_value_is_named() {
    let text = "[limits]\nconnections = 100\n[[policy]]\nname = 'a b'\n[[policy]]\nname = 'x'\nlease = { ttl_s = 0 }";
    let error = Config::parse(text).expect_err("three values are wrong").to_string();
    for pointer in ["/limits/connections", "/policy/0/name", "/policy/1/lease/ttl_s"] {
        assert!(error.contains(pointer), "{pointer} is not in {error}");
    }
}

#[test]
fn rules_name_teachers_that_the_file_has() {
    let upstream =
        "[sessions]\nlisten = '127.0.0.1:0'\n[[upstream]]\nname = 'big'\nkind = 'vllm'\nurls = ['http://h']\n";
    let rules = |name: &str| {
        format!(
            "[policy_defaults.sessions]\nteacher = '{name}'\n[[policy]]\nname = 'x'\nsessions = {{ teacher = '{name}' }}"
        )
    };
    Config::parse(&format!("{upstream}{}", rules("big"))).expect("the teacher exists");
    let error =
        Config::parse(&format!("{upstream}{}", rules("small"))).expect_err("there is no such teacher").to_string();
    assert!(error.contains("/policy_defaults/sessions/teacher"), "{error}");
    assert!(error.contains("policy `x` has the teacher `small`"), "{error}");
}

#[test]
fn a_body_is_at_most_what_the_database_and_arrow_can_hold_and_budgets_fit_bodies() {
    let wrong = |limits: &str| Config::parse(&format!("[limits]\n{limits}")).expect_err("it is wrong").to_string();
    let huge = wrong("body_bytes = 536870913\ninflight_bytes = 2000000000\nsamples_bytes = 4000000000");
    assert_eq!(huge, "/limits/body_bytes: must be at most 536870912, but is 536870913");
    let narrow = wrong("samples_bytes = 268435455\ncontrol_bytes = 1");
    assert!(narrow.contains("/limits/samples_bytes") && narrow.contains("/limits/control_bytes"), "{narrow}");
}

#[test]
fn settings_of_payloads_that_are_out_of_range_are_refused_together() {
    let text = "segment_file_bytes = 1\n[objects]\nurl = 'ftp://x'\ngrace_s = 31536001\ncache_bytes = 1099511627777";
    let error = Config::parse(text).expect_err("all are wrong").to_string();
    for name in ["/segment_file_bytes", "/objects/url", "/objects/grace_s", "/objects/cache_bytes"] {
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn a_quota_names_policies_and_what_it_bounds() {
    let wrong = |quota: &str| Config::parse(&format!("[[quota]]\n{quota}")).expect_err("it is wrong").to_string();
    assert!(wrong("max_policies = 1").starts_with("/quota/0/policies: must be 1 to 64 names"));
    assert!(wrong("policies = ['a', 'b c']\nmax_policies = 1").starts_with("/quota/0/policies/1: must match"));
    assert!(wrong("policies = ['a.*']").starts_with("/quota/0: bounds nothing: write `max_policies`"));
    assert!(wrong("policies = ['a.*']\nmax_backlog = 1").contains("/quota/0/max_backlog"));
    assert!(Config::parse("quota = 1").expect_err("it is wrong").to_string().contains("write [[quota]]"));
    Config::parse("[[quota]]\npolicies = ['a.*']\nmax_sessions = 0").expect("a team may have no sessions");
    let policies = "[[policy]]\nname = 'a.one'\n[[policy]]\nname = 'a.two'\nbacklog = { max_bytes = 64 }";
    let exceeded = wrong(&format!("policies = ['a.*']\nmax_policies = 1\nmax_backlog_bytes = 8589934592\n{policies}"));
    assert!(exceeded.contains("/quota/0/max_policies: is 1, and this file has 2 of these policies"), "{exceeded}");
    assert!(exceeded.contains("adds up to 8589934656; a [[policy]] that does not set it has 8589934592"), "{exceeded}");
}

#[test]
fn a_setting_that_was_renamed_is_refused_with_its_new_name() {
    let error = Config::parse("[limits]\nlook_ms = 500").expect_err("the setting has another name").to_string();
    assert_eq!(error, "/limits/look_ms: this setting was renamed: write `waiter_poll_interval_ms`");
}

#[test]
fn every_value_of_a_wrong_type_is_named_with_those_that_are_out_of_range() {
    let text = "listen = 'foo'\ndatabase = 'mysql://x'\nlog = 'xml'\nauto_create = 1\nlissten = 'x'\n[tls]\nkey = 1\n\
         [limits]\nwaiters = '9'\nconnections = 20\nwaiter_poll_interval_ms = 0\nheader_timeout_s = 9223372036854775807\n\
         [policy_defaults]\nrequire = ['tokenz', 'tokens', 'logs']\ngroup = { size = 'x', min_size = 3, timeout_s = 0 }\n\
         [[policy]]\nname = 7\ngrup = {}\nadvantage = 'best'\n\
         [[policy]]\nname = 'a b'\nbatch = 3\n\
         [[policy.filter]]\nname = 'x'\nscope = 'all'\nwhen = 'true'\naction = 'keep'\n\
         [[policy.filter]]\nname = 'y'\nscope = 'group'\nwhen = 1\naction = 'drop'";
    let Err(ConfigError::Invalid(found)) = Config::parse(text) else { panic!("they are all wrong") };
    let found: BTreeSet<&str> = found.iter().map(|violation| violation.pointer.as_str()).collect();
    let wrong = [
        "/listen",
        "/database",
        "/log",
        "/auto_create",
        "/lissten",
        "/tls/key",
        "/tls/certificate",
        "/limits/waiters",
        "/limits/waiter_poll_interval_ms",
        "/limits/header_timeout_s",
        "/policy_defaults/require/0",
        "/policy_defaults/require/2",
        "/policy_defaults/group/size",
        "/policy_defaults/group/timeout_s",
        "/policy/0/name",
        "/policy/0/grup",
        "/policy/0/advantage",
        "/policy/1/name",
        "/policy/1/batch",
        "/policy/1/filter/0/scope",
        "/policy/1/filter/0/action",
        "/policy/1/filter/1/when",
    ];
    assert_eq!(found, BTreeSet::from(wrong));
}

#[test]
fn a_number_that_toml_has_no_room_for_is_named_with_all_others() {
    let text = "listen = 'foo'\n[limits]\nheader_timeout_s = 18446744073709551615\nwaiters = -1\n\
         [[policy]]\nname = 'x'\nloss_constant = 1e999\nbatch = { groups = 99999999999999999999 }";
    let Err(ConfigError::Invalid(found)) = Config::parse(text) else { panic!("they are all wrong") };
    let found: BTreeSet<(&str, &str)> =
        found.iter().map(|violation| (violation.pointer.as_str(), violation.detail.as_str())).collect();
    let wrong = [
        ("/limits/header_timeout_s", "the number is too large"),
        ("/limits/waiters", "must be a whole number of at least 0, not -1"),
        ("/listen", "`foo` is not an address with a port, such as 127.0.0.1:8080 or [::1]:8080"),
        ("/policy/0/batch/groups", "the number is too large"),
        ("/policy/0/loss_constant", "the number is too large"),
    ];
    assert_eq!(found, BTreeSet::from(wrong));
}

#[test]
fn every_error_of_form_is_named_with_its_line() {
    let error = Config::parse("listen = foo\n[limits]\nwaiters = 1 2\n\n[tls\nkey = 'x'").expect_err("it is no TOML");
    let said = error.to_string();
    for line in ["line 1", "line 3", "line 5"] {
        assert!(said.contains(line), "{said}");
    }
}

/// A file in which every key has a value.
const WHOLE: &str = include_str!("../../configs/forebay.toml");

#[test]
fn what_is_wrong_with_a_value_names_no_type_of_the_implementation() {
    let whole: toml::Table = toml::from_str(WHOLE).expect("the file is TOML");
    let mut texts = Vec::new();
    replace_each(&toml::Value::Table(whole), &mut |value| {
        if value.is_table() {
            texts.push(toml::to_string(&value).expect("a table can be written"));
        }
    });
    assert!(texts.len() > 200, "{}", texts.len());
    let mut refused = 0;
    for text in texts {
        let Err(error) = Config::parse(&text) else { continue };
        refused += 1;
        let said = error.to_string();
        for word in [
            "f32",
            "f64",
            "u8",
            "u32",
            "u64",
            "i32",
            "i64",
            "usize",
            "struct",
            "enum",
            "variant",
            "sequence",
            " map",
            "tuple",
            "expected",
            "invalid type",
            "wanted",
            "string",
        ] {
            assert!(!said.contains(word), "`{word}` is in {said}");
        }
    }
    assert!(refused > 150, "{refused}");
}

/// Calls `with` for every value within one, replaced by a value of each kind in turn.
fn replace_each(value: &toml::Value, with: &mut dyn FnMut(toml::Value)) {
    use toml::Value as V;
    for other in [
        V::Integer(-1),
        V::Float(1.5),
        V::Boolean(true),
        V::String("x".into()),
        V::Array(vec![]),
        V::Table(toml::Table::new()),
    ] {
        if other.type_str() != value.type_str() {
            with(other);
        }
    }
    match value {
        V::Table(table) => {
            for (key, inner) in table {
                replace_each(inner, &mut |changed| {
                    let mut table = table.clone();
                    table.insert(key.clone(), changed);
                    with(V::Table(table));
                });
            }
        }
        V::Array(items) => {
            for (index, inner) in items.iter().enumerate() {
                replace_each(inner, &mut |changed| {
                    let mut items = items.clone();
                    items[index] = changed;
                    with(V::Array(items));
                });
            }
        }
        _ => {}
    }
}

#[test]
fn times_and_sizes_have_a_largest_value() {
    let of = |name: &str, value: &str| Config::parse(&format!("[limits]\n{name} = {value}"));
    for name in [
        "connections",
        "header_timeout_s",
        "body_bytes",
        "body_timeout_s",
        "inflight_bytes",
        "trajectory_tokens",
        "trajectory_segments",
        "metadata_bytes",
        "control_bytes",
        "samples_bytes",
        "policies",
        "waiters",
        "waiters_per_key",
        "waiter_poll_interval_ms",
        "stall_timeout_s",
        "drain_s",
        "shutdown_s",
    ] {
        let error = of(name, "9223372036854775807").expect_err("it is too large").to_string();
        assert!(error.contains(&format!("/limits/{name}: must be at most")), "{error}");
        // More than an integer of TOML holds.
        let error = of(name, "18446744073709551615").expect_err("it is too large").to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn the_share_of_audits_is_a_share() {
    for audit in ["0", "0.0", "0.001", "1.0"] {
        assert!(Config::parse(&format!("[sessions]\naudit = {audit}")).is_ok(), "{audit}");
    }
    for audit in ["-0.1", "1.5", "nan", "inf"] {
        let error = Config::parse(&format!("[sessions]\naudit = {audit}")).expect_err("it is no share").to_string();
        assert!(error.contains("/sessions/audit: must be a share from 0 to 1"), "{error}");
    }
}

#[test]
fn addresses_have_a_port() {
    for listen in ["127.0.0.1:0", "[::1]:8080", "localhost:8080", "my-host.example:80", "0.0.0.0:65535"] {
        assert_eq!(check_listen(listen), Ok(()));
    }
    for listen in ["foo", "127.0.0.1", ":8080", "::1:8080", "http://a:80", "a:65536", "a:", "a b:80", ""] {
        assert!(check_listen(listen).is_err(), "{listen}");
    }
}

#[test]
fn hosts_are_names_without_ports() {
    let config = Config::parse("[access]\nhosts = ['Forebay.Example', '10.0.0.7']").expect("they are names");
    assert_eq!(config.access.hosts, ["forebay.example", "10.0.0.7"]);
    for host in ["a:80", "http://a", "a/b", "", "[::1]"] {
        let error = Config::parse(&format!("[access]\nhosts = ['{host}']")).expect_err("it is no name").to_string();
        assert!(error.contains("/access/hosts/0"), "{error}");
    }
}

#[test]
fn the_databases_password_stays_out_of_what_is_printed() {
    let config = Config::parse("database = 'postgres://me:hunter2@db/forebay'").expect("it is a URL");
    assert!(!format!("{config:?}").contains("hunter2"));
    assert!(config.database.reveal().contains("hunter2"));
}

#[test]
fn unknown_keys_are_refused() {
    let error = Config::parse("lissten = 'x'").expect_err("the key is misspelt").to_string();
    assert!(error.contains("lissten"), "{error}");
    let error = Config::parse("[[policy]]\nname = 'x'\ngrup = {}").expect_err("the key is misspelt").to_string();
    assert!(error.contains("grup"), "{error}");
}

#[test]
fn keys_of_the_mode_exact_are_checked_together() {
    let parse = |keys: &str| {
        let upstream = "[sessions]\nlisten = '127.0.0.1:0'\n[[upstream]]\nname = 'x'\nurls = ['http://a']\n";
        Config::parse(&format!("{upstream}{keys}"))
    };
    for (keys, expected) in [
        ("kind = 'sglang'\ntokenizer = 'a'", "/upstream/0/tokenizer: belongs to mode"),
        ("kind = 'sglang'\nfamily = 'qwen'\nmode = 'observe'", "/upstream/0/family: belongs to mode"),
        ("kind = 'sglang'\nmode = 'exact'", "/upstream/0/tokenizer: is required"),
        ("kind = 'openai'\nmode = 'exact'\ntokenizer = 'a'", "/upstream/0/mode: exact needs"),
        ("kind = 'vllm'\nmode = 'exact'\ntokenizer = 'a'", "/upstream/0/context_tokens: is required"),
        ("kind = 'vllm'\nmode = 'exact'\ntokenizer = 'a'\ncontext_tokens = 0", "/upstream/0/context_tokens: must be"),
        ("kind = 'sglang'\nmode = 'exact'\ntokenizer = 'a'\nfamily = 1", "/upstream/0/family: must be the name"),
        ("kind = 'sglang'\nmode = 'exact'\ntokenizer = 'a'\nfamily = { stop = [] }", "/upstream/0/family/stop"),
        ("kind = 'sglang'\nmode = 'guess'", "/upstream/0/mode"),
        ("kind = 'sglang'\nspecial_tokens_in_text = 'escape'", "/upstream/0/special_tokens_in_text: belongs to mode"),
        ("kind = 'sglang'\nspecial_tokens_in_text = 'drop'", "/upstream/0/special_tokens_in_text"),
        ("kind = 'sglang'\nlater_system = 'drop'", "/upstream/0/later_system"),
        ("kind = 'sglang'\nimages = 'see'", "/upstream/0/images"),
        ("kind = 'sglang'\npass = ['cache_salt', 'stop']", "/upstream/0/pass/1: \"stop\" is set by the service"),
        ("kind = 'sglang'\npass = ['lora_path']", "/upstream/0/pass/0: \"lora_path\" is never passed on"),
    ] {
        let error = parse(keys).expect_err("it is wrong").to_string();
        assert!(error.contains(expected), "{expected:?} is not in {error}");
    }
    let keys = "kind = 'vllm'\nmode = 'exact'\ntokenizer = 'a'\ncontext_tokens = 9\npass = ['cache_salt']\n\
                special_tokens_in_text = 'refuse'\nfamily = { stops = ['<e>'], close = '<e>' }";
    let agents = parse(keys).expect("it is complete").agents.expect("there is a listener");
    let exact = agents.upstreams[0].exact.as_ref().expect("it is complete");
    assert_eq!(exact.special_tokens_in_text, forebay_gateway::upstream::SpecialTokensInText::Refuse);
    assert_eq!(agents.upstreams[0].options.pass, ["cache_salt"]);
    assert_eq!(agents.upstreams[0].options.context_tokens, Some(9));
}

#[test]
fn tokenizers_are_named_by_patterns_and_checked_before_the_service_starts() {
    let config = Config::parse("[console]\ntokenizers = { 'math.*' = '/no/such/file.json' }").expect("it is valid");
    assert_eq!(config.tokenizers.unusable().count(), 1);
    let error = Config::parse("[console]\ntokenizers = { 'a b' = '/x', 'c' = 1 }\ncolour = 'red'");
    let error = error.expect_err("three values are wrong").to_string();
    for pointer in ["/console/tokenizers/a b", "/console/tokenizers/c", "/console/colour"] {
        assert!(error.contains(pointer), "{pointer} is not in {error}");
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (file, tokenizer) = (folder.path().join("forebay.toml"), folder.path().join("tokenizer.json"));
    std::fs::write(&file, format!("[console]\ntokenizers = {{ '*' = '{}' }}", tokenizer.display())).expect("written");
    let error = Config::check(&file).expect_err("the tokenizer is missing").to_string();
    assert!(error.starts_with("/console/tokenizers/*: "), "{error}");
    std::fs::write(&tokenizer, "{}").expect("written");
    Config::check(&file).expect("the tokenizer is there");
}
