//! What libraries need to read the numbers of a JSON body. `benches/decode.rs` has the service's own reader, which reads
//! the same body.
//!
//! `readers READER TIMES` reads the body that many times. It prints the tokens and bytes of the body and the median time
//! in nanoseconds. `scripts/instructions --readers` runs it under valgrind and subtracts the set-up.

#[path = "../../bodies/json.rs"]
mod json;

use std::{error::Error, hint::black_box, time::Instant};

use lexical_core::FromLexical;
use serde::Deserialize;

/// The columns of a rollout. Other fields of the body are skipped, which is less work than the service's reader has.
#[derive(Deserialize)]
struct Rollout {
    segments: Vec<Segment>,
}

#[derive(Deserialize)]
struct Segment {
    tokens: Vec<i32>,
    loss_mask: Vec<u8>,
    logprobs: Vec<f32>,
}

fn with_serde_json(body: &[u8]) -> Result<Vec<Rollout>, Box<dyn Error>> {
    Ok(serde_json::from_slice(body)?)
}

/// The library needs a copy of the body, because it changes the text while it reads.
fn with_simd_json(body: &[u8]) -> Result<Vec<Rollout>, Box<dyn Error>> {
    Ok(simd_json::serde::from_slice(&mut body.to_vec())?)
}

/// Finds the arrays by their names and reads nothing else, so that hardly more than the library's own work is counted.
fn with_lexical_core(mut body: &[u8]) -> Result<Vec<Segment>, Box<dyn Error>> {
    let mut segments = Vec::with_capacity(json::ROLLOUTS);
    while let Some(rest) = after(body, b"\"tokens\": [") {
        let (tokens, rest) = numbers(rest)?;
        let (loss_mask, rest) = numbers(after(rest, b"\"loss_mask\": [").ok_or("a segment has a mask")?)?;
        let rest = after(rest, b"\"logprobs\": [").ok_or("a segment has log-probabilities")?;
        let (logprobs, rest) = numbers(rest)?;
        segments.push(Segment { tokens, loss_mask, logprobs });
        body = rest;
    }
    Ok(segments)
}

/// The text after the first occurrence of a name.
fn after<'t>(text: &'t [u8], name: &[u8]) -> Option<&'t [u8]> {
    let found = text.windows(name.len()).take(256).position(|window| window == name)?;
    text.get(found + name.len()..)
}

/// The numbers of an array, and the text after it.
fn numbers<T: FromLexical>(mut text: &[u8]) -> Result<(Vec<T>, &[u8]), Box<dyn Error>> {
    let mut numbers = Vec::with_capacity(json::TOKENS);
    loop {
        let (number, length) = lexical_core::parse_partial(text)?;
        numbers.push(number);
        match &text[length..] {
            [b',', b' ', rest @ ..] | [b',', rest @ ..] => text = rest,
            [b']', rest @ ..] => return Ok((numbers, rest)),
            _ => return Err("a number is followed by a comma or a bracket".into()),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [reader, times] = arguments.as_slice() else { return Err("readers READER TIMES".into()) };
    let times: usize = times.parse()?;
    let body = json::json();
    let columns = json::ROLLOUTS * (3 * json::TOKENS - 2);
    let mut spent = Vec::with_capacity(times);
    for _ in 0..times {
        let started = Instant::now();
        let segments: Vec<Segment> = match reader.as_str() {
            "serde-json" => with_serde_json(&body)?.into_iter().flat_map(|rollout| rollout.segments).collect(),
            "simd-json" => with_simd_json(&body)?.into_iter().flat_map(|rollout| rollout.segments).collect(),
            "lexical-core" => with_lexical_core(&body)?,
            _ => return Err(format!("there is no reader `{reader}`").into()),
        };
        let read: usize =
            segments.iter().map(|read| read.tokens.len() + read.loss_mask.len() + read.logprobs.len()).sum();
        assert_eq!(read, columns, "every number of the body is read");
        drop(black_box(segments));
        spent.push(started.elapsed());
    }
    spent.sort_unstable();
    let median = spent.get(times / 2).map_or(0, |median| median.as_nanos());
    println!("{} {} {median}", json::ROLLOUTS * json::TOKENS, body.len());
    Ok(())
}
