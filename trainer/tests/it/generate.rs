//! Sampling draws from the model, returns the log-probability of each token, and can be continued.

use forebay_trainer::generate::{Completion, Finish, GenerateError, Sampling, Session};
use forebay_trainer::model::Decoder;
use tch::{Kind, Tensor};

use crate::golden::Golden;

fn prompts() -> Vec<Vec<i64>> {
    vec![vec![3, 1, 4, 1, 5, 9, 2, 6], vec![2, 7], vec![31, 41, 59, 26, 53], vec![8]]
}

/// The largest difference between the log-probabilities of a completion that ends at
/// `end` of `tokens` and those of a forward pass over the whole row.
fn logprob_error(decoder: &Decoder, tokens: &[i64], end: usize, completion: &Completion, temperature: f64) -> f64 {
    let whole = Tensor::from_slice(tokens).unsqueeze(0);
    let logits = tch::no_grad(|| decoder.logits(&decoder.hidden(&whole)));
    let logprobs = (logits / temperature).log_softmax(-1, Kind::Float);
    let start = end - completion.tokens.len();
    assert_eq!(&tokens[start..end], completion.tokens);
    let differences = completion.logprobs.iter().enumerate().map(|(index, &found)| {
        let at = (start + index) as i64;
        (logprobs.double_value(&[0, at - 1, tokens[at as usize]]) - f64::from(found)).abs()
    });
    differences.fold(0.0, f64::max)
}

#[test]
fn log_probabilities_are_those_of_the_full_forward_pass() {
    let sampling = Sampling { temperature: 0.8, new_tokens_max: 20, stop_tokens: vec![7, 30], ..Sampling::default() };
    for golden in Golden::all() {
        let decoder = golden.decoder();
        let mut session = Session::new(&decoder, &prompts(), 11).expect("valid");
        let mut largest: f64 = 0.0;
        for completion in session.generate(&[0, 1, 2, 3], &sampling).expect("valid") {
            let tokens = session.tokens(completion.row);
            largest = largest.max(logprob_error(&decoder, tokens, tokens.len(), &completion, 0.8));
        }
        eprintln!("log-probabilities of {}: {largest:.2e}", golden.name());
        assert!(largest < 1e-5, "{}: {largest:e}", golden.name());
    }
}

#[test]
fn a_row_goes_on_after_tokens_are_appended() {
    let decoder = Golden::open("qwen3-sharded").decoder();
    let sampling = Sampling { new_tokens_max: 6, ..Sampling::default() };
    let mut session = Session::new(&decoder, &prompts(), 3).expect("valid");
    let mut largest: f64 = 0.0;
    for rows in [vec![0, 1, 2, 3], vec![2], vec![3, 0], vec![1, 2, 3]] {
        for &row in &rows {
            session.append(row, &[row as i64; 5][..=row]).expect("valid");
        }
        let completions = session.generate(&rows, &sampling).expect("valid");
        assert_eq!(completions.iter().map(|completion| completion.row).collect::<Vec<_>>(), rows);
        for completion in completions {
            let tokens = session.tokens(completion.row);
            largest = largest.max(logprob_error(&decoder, tokens, tokens.len(), &completion, 1.0));
        }
    }
    eprintln!("log-probabilities after appending: {largest:.2e}");
    assert!(largest < 1e-5, "{largest:e}");
}

#[test]
fn equal_seeds_draw_equal_tokens_whatever_other_rows_run() {
    let decoder = Golden::open("llama3-rope").decoder();
    let sampling = Sampling { new_tokens_max: 12, ..Sampling::default() };
    let run = |seed, rows: &[usize]| {
        let mut session = Session::new(&decoder, &prompts(), seed).expect("valid");
        session.generate(rows, &sampling).expect("valid")
    };
    let all = run(5, &[0, 1, 2, 3]);
    assert_eq!(all, run(5, &[0, 1, 2, 3]));
    assert_eq!(all[2].tokens, run(5, &[2])[0].tokens);
    assert_ne!(all[2].tokens, run(6, &[2])[0].tokens);
}

#[test]
fn a_row_ends_with_its_stop_token_or_at_its_length() {
    let decoder = Golden::open("llama-yarn").decoder();
    let stop_tokens: Vec<i64> = (0..16).collect();
    let sampling = Sampling { stop_tokens: stop_tokens.clone(), new_tokens_max: 4, ..Sampling::default() };
    let mut session = Session::new(&decoder, &vec![vec![1, 2, 3]; 32], 9).expect("valid");
    let rows: Vec<usize> = (0..32).collect();
    let completions = session.generate(&rows, &sampling).expect("valid");
    for completion in &completions {
        let (last, before) = completion.tokens.split_last().expect("at least one token");
        assert!(before.iter().all(|token| !stop_tokens.contains(token)));
        match completion.finish {
            Finish::Stop => assert!(stop_tokens.contains(last)),
            Finish::Length => assert!(completion.tokens.len() == 4 && !stop_tokens.contains(last)),
        }
    }
    let stopped = completions.iter().filter(|completion| completion.finish == Finish::Stop).count();
    assert!(stopped > 0 && stopped < 32, "both ends occur, {stopped}");
}

#[test]
fn draws_follow_the_distribution_of_the_model() {
    const ROWS: usize = 4_000;
    let decoder = Golden::open("qwen2-tied").decoder();
    let prompt = vec![5, 6, 7];
    let sampling = Sampling { temperature: 3.0, new_tokens_max: 1, ..Sampling::default() };
    let mut session = Session::new(&decoder, &vec![prompt.clone(); ROWS], 1).expect("valid");
    let drawn = session.generate(&(0..ROWS).collect::<Vec<_>>(), &sampling).expect("valid");
    let mut counts = [0.0_f64; 64];
    for completion in drawn {
        counts[completion.tokens[0] as usize] += 1.0;
    }
    let hidden = tch::no_grad(|| decoder.hidden(&Tensor::from_slice(&prompt).unsqueeze(0)));
    let logits = tch::no_grad(|| decoder.logits(&hidden)).get(0).get(2) / 3.0;
    let probabilities = Vec::<f64>::try_from(logits.softmax(-1, Kind::Double)).expect("floats");
    for (count, probability) in counts.iter().zip(probabilities) {
        let (mean, variance) = (ROWS as f64 * probability, ROWS as f64 * probability * (1.0 - probability));
        assert!((count - mean).abs() < 5.0 * variance.sqrt() + 1.0, "{count} drawn, {mean} expected");
    }
}

#[test]
fn the_likeliest_is_drawn_with_a_top_k_of_one() {
    let decoder = Golden::open("llama3-rope").decoder();
    let sampling = Sampling { top_k: Some(1), new_tokens_max: 8, ..Sampling::default() };
    let mut session = Session::new(&decoder, &prompts(), 0).expect("valid");
    session.generate(&[0, 1, 2, 3], &sampling).expect("valid");
    let tokens = Tensor::from_slice(session.tokens(0)).unsqueeze(0);
    let likeliest = tch::no_grad(|| decoder.logits(&decoder.hidden(&tokens))).argmax(-1, false).get(0);
    let likeliest = Vec::<i64>::try_from(likeliest).expect("integers");
    assert_eq!(likeliest[7..15], session.tokens(0)[8..16]);
}

#[test]
fn what_cannot_be_done_is_refused() {
    let decoder = Golden::open("llama3-rope").decoder();
    assert!(matches!(Session::new(&decoder, &[vec![64]], 0), Err(GenerateError::Token { token: 64, vocab_size: 64 })));
    let mut session = Session::new(&decoder, &[vec![1], vec![]], 0).expect("valid");
    let sampling = Sampling::default();
    assert_eq!(session.append(0, &[-1]), Err(GenerateError::Token { token: -1, vocab_size: 64 }));
    assert_eq!(session.append(2, &[1]), Err(GenerateError::Row(2)));
    assert_eq!(session.generate(&[1], &sampling), Err(GenerateError::Empty(1)));
    assert_eq!(session.generate(&[0, 0], &sampling), Err(GenerateError::Row(0)));
    for refused in [
        Sampling { temperature: 0.0, ..sampling.clone() },
        Sampling { top_k: Some(0), ..sampling.clone() },
        Sampling { top_p: Some(0.0), ..sampling.clone() },
        Sampling { new_tokens_max: 0, ..sampling.clone() },
    ] {
        assert!(matches!(session.generate(&[0], &refused), Err(GenerateError::Setting { .. })));
    }
}
