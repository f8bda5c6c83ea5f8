//! Decoding with the cache gives the same results as computing whole sequences.

use forebay_trainer::model::{Decoder, KvCache};
use tch::Tensor;

use crate::golden::{Golden, assert_close, some_tokens};

/// Logits of whole sequences.
fn whole(decoder: &Decoder, tokens: &Tensor) -> Tensor {
    tch::no_grad(|| decoder.logits(&decoder.hidden(tokens)))
}

fn extend(decoder: &Decoder, tokens: &Tensor, counts: &[usize], cache: &mut KvCache) -> Tensor {
    let hidden = decoder.extend(tokens, counts, cache);
    cache.logits(&hidden)
}

#[test]
fn a_prompt_and_then_single_tokens_give_the_logits_of_the_whole() {
    for golden in Golden::all() {
        let decoder = golden.decoder();
        let tokens = some_tokens(3, 40);
        let expected = whole(&decoder, &tokens);
        let mut cache = decoder.cache(3);
        let mut logits = vec![extend(&decoder, &tokens.narrow(1, 0, 9), &[9; 3], &mut cache)];
        logits.extend((9..40).map(|at| extend(&decoder, &tokens.narrow(1, at, 1), &[1; 3], &mut cache)));
        assert_close(&format!("logits of {}", golden.name()), &Tensor::cat(&logits, 1), &expected, 1e-5);
    }
}

#[test]
fn rows_of_different_lengths_advance_on_their_own() {
    for golden in Golden::all() {
        let decoder = golden.decoder();
        let tokens = some_tokens(3, 30);
        let expected = whole(&decoder, &tokens);
        let mut cache = decoder.cache(3);
        // Prompts, single tokens, pieces of several tokens, and a row that does not run.
        for counts in [[4, 11, 7], [1, 1, 1], [6, 0, 2], [1, 1, 1], [3, 5, 0], [1, 1, 1]] {
            let width = counts.into_iter().max().expect("three rows") as i64;
            let pieces: Vec<Tensor> =
                (0..3).map(|row| tokens.get(row).narrow(0, cache.length(row as usize) as i64, width)).collect();
            let starts: Vec<usize> = (0..3).map(|row| cache.length(row)).collect();
            let logits = extend(&decoder, &Tensor::stack(&pieces, 0), &counts, &mut cache);
            for (row, (start, count)) in starts.into_iter().zip(counts).enumerate() {
                let found = logits.get(row as i64).narrow(0, 0, count as i64);
                let whole = expected.get(row as i64).narrow(0, start as i64, count as i64);
                if count > 0 {
                    assert_close(&format!("logits of row {row} from {start}"), &found, &whole, 1e-5);
                }
            }
        }
    }
}

#[test]
fn an_exchanged_row_goes_on_in_its_new_place() {
    let decoder = Golden::open("qwen3-sharded").decoder();
    let tokens = some_tokens(3, 12);
    let expected = whole(&decoder, &tokens);
    let mut cache = decoder.cache(3);
    let _prompt = decoder.extend(&tokens.narrow(1, 0, 8), &[8, 6, 8], &mut cache);
    cache.swap(0, 2);
    // Two rows run, the third waits.
    let next = Tensor::stack(&[tokens.get(2).narrow(0, 8, 1), tokens.get(1).narrow(0, 6, 1)], 0);
    let logits = extend(&decoder, &next, &[1, 1], &mut cache);
    assert_close("row 2 in place 0", &logits.get(0).get(0), &expected.get(2).get(8), 1e-5);
    assert_close("row 1 in place 1", &logits.get(1).get(0), &expected.get(1).get(6), 1e-5);
    cache.swap(2, 0);
    let logits = extend(&decoder, &tokens.get(0).narrow(0, 8, 1).unsqueeze(0), &[1], &mut cache);
    assert_close("row 0 back in place 0", &logits.get(0).get(0), &expected.get(0).get(8), 1e-5);
}

#[test]
fn the_cache_grows_beyond_its_first_capacity() {
    let decoder = Golden::open("llama3-rope").decoder();
    let tokens = some_tokens(1, 600);
    let expected = whole(&decoder, &tokens);
    let mut cache = decoder.cache(1);
    let logits: Vec<Tensor> =
        (0..6).map(|at| extend(&decoder, &tokens.narrow(1, at * 100, 100), &[100], &mut cache)).collect();
    assert_close("logits of 600 tokens", &Tensor::cat(&logits, 1), &expected, 1e-4);
}
