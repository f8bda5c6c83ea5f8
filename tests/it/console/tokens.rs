//! Tokens as text, their colours, and messages: the pure modules of the screen of a rollout, imported in the browser.

use serde_json::{Value, json};

use super::{Page, modules::contrast, open};
use crate::support::{Backend, TestApp};

/// A page in which modules can be imported.
async fn ready(app: &TestApp) -> Page {
    let page = open(app, "").await;
    page.wait_for("document.querySelector('h1') !== null").await;
    page
}

/// What the texts of ids are by a tokenizer file: pairs of text and kind.
async fn decode(page: &Page, file: &Value, ids: &[u32]) -> Value {
    let file = Value::from(file.to_string());
    let decoded = format!(
        "import('/console/tokens/vocabulary.js').then(({{parseTokenizer, decode}}) => \
         decode(parseTokenizer({file}), {ids:?}).map(({{text, kind}}) => [text, kind]))"
    );
    page.eval(&decoded).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_decoded_by_four_families_of_tokenizers() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    // The three bytes of 日 are spread over two tokens: e6 97, and a5.
    let bytes = json!({
        "model": {"type": "BPE", "vocab": {"Hi": 0, "Ġthere": 1, "æĹ": 2, "¥": 3, "Ċ": 4, "__proto__": 5}},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 9, "content": "<|end|>", "special": true}, {"id": 10, "content": "日"}],
    });
    let expected = json!([
        ["Hi", "text"],
        [" there", "text"],
        ["", "part"],
        ["日", "text"],
        ["\n", "text"],
        ["__proto__", "text"],
        ["<|end|>", "special"],
        ["日", "text"],
        ["77", "unknown"],
    ]);
    assert_eq!(decode(&page, &bytes, &[0, 1, 2, 3, 4, 5, 9, 10, 77]).await, expected);
    let broken = json!([["\u{fffd}", "text"], ["<|end|>", "special"], ["\u{fffd}", "text"]]);
    assert_eq!(decode(&page, &bytes, &[2, 9, 2]).await, broken, "a character that is not completed");

    let pieces = json!({
        "model": {"type": "BPE", "byte_fallback": true, "vocab": {"▁Hi": 0, "▁": 1, "<0xE6>": 2, "<0x97>": 3, "<0xA5>": 4}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    });
    let expected = json!([[" Hi", "text"], [" ", "text"], ["", "part"], ["", "part"], ["日", "text"]]);
    assert_eq!(decode(&page, &pieces, &[0, 1, 2, 3, 4]).await, expected);
    let unigram = json!({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.5], ["b", -2]]}});
    assert_eq!(decode(&page, &unigram, &[1, 2]).await, json!([[" a", "text"], ["b", "text"]]));

    let words = json!({"model": {"type": "WordPiece", "vocab": {"play": 0, "##ing": 1, "well": 2}}});
    let expected = json!([["play", "text"], ["ing", "text"], [" well", "text"]]);
    assert_eq!(decode(&page, &words, &[0, 1, 2]).await, expected);
    let levels = json!({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}});
    assert_eq!(decode(&page, &levels, &[0, 1]).await, json!([["a", "text"], [" b", "text"]]));
    // A vocabulary alone.
    assert_eq!(decode(&page, &json!({"Ġa": 0, "b": 1}), &[0, 1]).await, json!([[" a", "text"], ["b", "text"]]));

    for (file, said) in [
        ("{", "The file is not JSON."),
        ("[1]", "not a JSON object"),
        ("{\"model\": {}}", "`model.vocab` is missing"),
        ("{\"model\": {\"vocab\": {\"a\": -1, \"b\": \"x\"}}}", "is empty"),
    ] {
        let failed = format!(
            "import('/console/tokens/vocabulary.js').then(({{parseTokenizer}}) => {{ \
             try {{ parseTokenizer({}); return 'read'; }} catch (error) {{ return error.message; }} }})",
            Value::from(file)
        );
        let failed = page.eval(&failed).await;
        assert!(failed.as_str().is_some_and(|text| text.contains(said)), "{file}: {failed}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_on_every_scale_has_enough_contrast() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    let grounds = "import('/console/tokens/scale.js').then((scale) => {
        const steps = [...Array(41).keys()].map((step) => step / 20 - 1);
        return { ink: scale.INK, grounds: steps.flatMap((step) =>
            [scale.sequential(-Math.abs(step), -1), scale.signed(step, 1), scale.age(step, { min: -1, max: 1 })]) };
    })";
    let found = page.eval(grounds).await;
    let ink = found["ink"].as_str().expect("a colour");
    for ground in found["grounds"].as_array().expect("a list") {
        let ground = ground.as_str().expect("a colour");
        assert!(contrast(ink, ground) >= 4.5, "{ink} on {ground}: {}", contrast(ink, ground));
    }
    let pairs = [
        ("token-ink", "token-trained"),
        ("token-ink", "token-withheld"),
        ("token-ink", "found"),
        ("token-ink", "found-here"),
        ("text", "role-system"),
        ("text", "role-user"),
        ("text", "role-assistant"),
        ("text", "role-tool"),
        ("text", "role-other"),
        ("text-quiet", "role-system"),
        ("text-quiet", "role-user"),
        ("text-quiet", "role-assistant"),
        ("text-quiet", "role-tool"),
        ("text-quiet", "role-other"),
    ];
    for scheme in ["light", "dark"] {
        page.prefers(scheme, false).await;
        let token = async |name: &str| {
            let value = format!("getComputedStyle(document.body).getPropertyValue('--{name}').trim()");
            page.eval(&value).await.as_str().expect("a token is text").to_owned()
        };
        assert_eq!(token("token-ink").await, ink, "the style and the scales have one ink");
        for (text, ground) in pairs {
            let found = contrast(&token(text).await, &token(ground).await);
            assert!(found >= 4.5, "{scheme}: {text} on {ground}: {found:.2}");
        }
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scales_are_symmetric_and_one_outlier_does_not_make_all_others_alike() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    let found = page
        .eval(
            "import('/console/tokens/scale.js').then(({bound, scaleOf, signed, sequential, kindOf, versionsOf}) => {
                const many = [...Array(99).keys()].map((index) => (index % 2 ? -1 : 1) * index / 98);
                const window = { from: 10, to: 14, prompt_tokens: 11, loss_mask: [null, 1, 0, 1],
                    trained_mask: [null, 0, 0, 1], logprobs: [null, -2, -9, null], values: [null, -3, NaN, 3],
                    versions: [[7, 0, 1], [8, 1, 9]], tokens: [1, 2, 3, 4] };
                const facts = { advantage: -1, advantages: [-1, 2], versions: { min: 7, max: 8 } };
                const of = (mode) => {
                    const scale = scaleOf(mode, window, facts);
                    return { grounds: [0, 1, 2, 3].map(scale.ground), ends: scale.ends, missing: scale.missing };
                };
                return {
                    bound: bound([...many, 1000, NaN, null]),
                    empty: bound([NaN, null]),
                    middle: signed(0, 5) === signed(0, 0),
                    clipped: signed(7, 5) === signed(5, 5) && signed(-7, 5) === signed(-5, 5),
                    sides: signed(5, 5) !== signed(-5, 5),
                    none: [signed(null, 5), signed(NaN, 5), sequential(undefined, -1)],
                    kinds: window.loss_mask.map((mask, index) => kindOf(mask, window.trained_mask[index])),
                    versions: versionsOf(window),
                    logprob: of('logprob'), value: of('value'), advantage: of('advantage'), version: of('version'),
                    bare: scaleOf('value', { ...window, values: null }, facts).missing,
                    end: signed(3, 3),
                };
            })",
        )
        .await;
    assert!(found["bound"].as_f64().is_some_and(|bound| bound <= 1.0), "the outlier is clipped: {}", found["bound"]);
    assert_eq!(found["empty"], Value::Null);
    for holds in ["middle", "clipped", "sides"] {
        assert_eq!(found[holds], true, "{holds}");
    }
    assert_eq!(found["none"], json!([null, null, null]));
    assert_eq!(found["kinds"], json!(["prompt", "withheld", "masked", "trained"]));
    assert_eq!(found["versions"], json!([null, 7, 8, 8]));
    assert_eq!(found["logprob"]["ends"], json!(["0", "−2 (surprising)"]), "a masked token does not count");
    let grounds = found["logprob"]["grounds"].as_array().expect("a list");
    assert!(grounds[0].is_null() && grounds[1].is_string() && grounds[2].is_null() && grounds[3].is_null());
    assert_eq!(found["value"]["ends"], json!(["−3", "+3"]));
    assert_eq!((&found["value"]["grounds"][2], &found["value"]["grounds"][3]), (&Value::Null, &found["end"]));
    assert_eq!(found["advantage"]["ends"], json!(["−2", "+2"]), "siblings share a scale");
    assert_eq!(found["advantage"]["grounds"][1], Value::Null, "only what is trained has an advantage");
    assert_ne!(found["version"]["grounds"][1], found["version"]["grounds"][2]);
    assert_eq!(found["bare"], "The segment has no critic values.");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_any_shape_have_a_role_and_parts() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    // As JSON text: in a literal of JavaScript `__proto__` is no member.
    let read = async |message: &str| {
        let text = Value::from(message);
        let read = format!(
            "import('/console/chat/messages.js').then(({{readMessage}}) => {{ \
             const found = readMessage(JSON.parse({text})); \
             return {{ ...found, rest: found.rest === undefined ? null : JSON.stringify(found.rest), \
             kinds: found.parts.map(({{kind}}) => kind) }}; }})"
        );
        page.eval(&read).await
    };
    let kinds = async |message: &str| read(message).await["kinds"].clone();
    let call = r#"{"id": "c1", "type": "function", "function": {"name": "python", "arguments": "{}"}}"#;
    let found = read(&format!(
        r#"{{"role": "assistant", "name": "solver", "reasoning_content": "why", "content": "text", "tool_calls": [{call}], "score": 1}}"#
    ))
    .await;
    assert_eq!((&found["role"], &found["name"]), (&json!("assistant"), &json!("solver")));
    assert_eq!(found["kinds"], json!(["reasoning", "text", "call"]));
    assert_eq!(found["parts"][2], json!({"kind": "call", "name": "python", "id": "c1", "text": "{}"}));
    assert_eq!(found["rest"], r#"{"score":1}"#);
    let data = "data:image/png;base64,iVBORw0KGgo=";
    let images = format!(
        r#"{{"role": "user", "content": [{{"type": "image_url", "image_url": {{"url": "{data}"}}}},
        {{"type": "image_url", "image_url": {{"url": "data:text/html,<script>"}}}},
        {{"type": "image_url", "image_url": {{"url": "//192.0.2.1/x.png"}}}},
        {{"type": "image", "source": {{"type": "base64", "media_type": "image/svg+xml", "data": "PHN2Zz4="}}}},
        {{"type": "audio"}}, "text", 7, {{"type": "thinking", "thinking": "x"}}]}}"#
    );
    let expected = json!(["image", "link", "link", "link", "json", "text", "json", "reasoning"]);
    assert_eq!(kinds(&images).await, expected, "only images with their bytes are images");
    let polluted = read(r#"{"__proto__": {"role": "x"}, "constructor": {"name": "y"}, "content": null}"#).await;
    assert_eq!((&polluted["role"], &polluted["kinds"]), (&Value::Null, &json!([])));
    assert_eq!(polluted["rest"], r#"{"__proto__":{"role":"x"},"constructor":{"name":"y"}}"#);
    for (message, expected) in [("\"text\"", "text"), ("7", "json"), ("null", "json"), ("[1, [2]]", "json")] {
        assert_eq!(kinds(message).await, json!([expected]), "{message}");
    }
    let odd = read(r#"{"role": 7, "content": {"a": 1}, "tool_calls": "none", "reasoning": {"b": 2}}"#).await;
    assert_eq!((&odd["role"], &odd["kinds"]), (&Value::Null, &json!(["json"])));
    assert_eq!(odd["rest"], r#"{"role":7,"tool_calls":"none","reasoning":{"b":2}}"#);
    let many = format!(r#"{{"content": [{}1]}}"#, "1,".repeat(5_000));
    let many = read(&many).await;
    assert_eq!((&many["kinds"].as_array().map(Vec::len), &many["hidden"]), (&Some(200), &json!(4_801)));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_of_any_depth_and_length_is_written() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = ready(&app).await;
    let write = async |text: &str| {
        let write = format!(
            "import('/console/chat/json.js').then(({{jsonText}}) => jsonText(JSON.parse({text})))",
            text = Value::from(text)
        );
        page.eval(&write).await
    };
    let written = write(r#"{"__proto__": {"a": [1, {"b": null}]}, "c": [], "d": "<x>"}"#).await;
    let expected = "{\n  \"__proto__\": {\n    \"a\": [\n      1,\n      {\n        \"b\": null\n      }\n    ]\n  },\n  \
        \"c\": [],\n  \"d\": \"<x>\"\n}";
    assert_eq!(written, json!({"text": expected, "isWhole": true}));
    let deep = write(&format!("{}{}", "[".repeat(10_000), "]".repeat(10_000))).await;
    assert_eq!(deep["isWhole"], false);
    assert!(deep["text"].as_str().is_some_and(|text| text.contains("…") && text.len() < 20_000));
    let long = write(&format!("[{}1]", "123456,".repeat(500_000))).await;
    assert_eq!(long["isWhole"], false);
    assert_eq!(long["text"].as_str().map(str::len), Some(200_000));
    app.finish().await;
}
