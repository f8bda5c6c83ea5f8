//! The fake engine itself: what the other tests rely on.

use forebay_fake_engine::{
    model::{Context, logprob},
    tokenizer::{VOCABULARY, decode, encode, encode_bytes},
};
use proptest::prelude::*;

#[test]
fn the_probabilities_of_all_ids_add_up_to_one() {
    for temperature in [0.5, 1.0, 2.0] {
        let context = Context::new(&[1, 2, 3]);
        let sum: f64 = (0..VOCABULARY).map(|id| f64::from(context.logprob(id, temperature)).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{sum}");
    }
}

#[test]
fn a_log_probability_depends_on_every_id_before() {
    let context = [5, 6, 7, 8];
    let expected = logprob(&context, 9, 1.0);
    for place in 0..context.len() {
        let mut other = context;
        other[place] += 1;
        assert_ne!(logprob(&other, 9, 1.0).to_bits(), expected.to_bits(), "id {place} matters");
    }
    assert_ne!(logprob(&[5, 7, 6, 8], 9, 1.0).to_bits(), expected.to_bits(), "the order matters");
    assert_ne!(logprob(&context[1..], 9, 1.0).to_bits(), expected.to_bits(), "the length matters");
}

#[test]
fn a_text_has_several_spellings_of_which_one_comes_back() {
    let text = r#"the ring <tool_call>{"command": "ls"}"#;
    assert_ne!(encode(text), encode_bytes(text));
    assert_eq!(decode(&encode_bytes(text)), text);
    assert_eq!(decode(&encode(text)), text);
    assert_ne!(encode(r#"{"a": "b"}"#).len(), encode(r#"{"a":"b"}"#).len(), "spaces in JSON change the ids");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn encoding_loses_nothing(text in "[a-z{}\":<|_ \u{e9}\u{1F642}]{0,60}|<think>|<\\|im_end\\|>") {
        prop_assert_eq!(decode(&encode(&text)), text.clone());
        prop_assert_eq!(decode(&encode_bytes(&text)), text);
    }
}
