//! The processing of a body from its bytes to the stored form, without the service, so that its instructions can be
//! counted.
//!
//! `decode PATH TIMES` runs one of the paths in [`Path`] that many times. It prints the tokens and bytes of the input
//! and the median time in nanoseconds. `scripts/instructions` also runs it under valgrind and subtracts the set-up.

mod bodies;

use std::{
    hint::black_box,
    io::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use forebay_api::parsers;
use forebay_domain::{
    formats::payload::Payload,
    ingest::new_rollout::NewRollout,
    surrogates::LoneSurrogates,
    trajectory::{Trajectory, TrajectoryLimits},
};
use forebay_wire::{self as wire, Retries};

const LIMITS: TrajectoryLimits = TrajectoryLimits {
    tokens_max: 2_000_000,
    segments_max: 4_096,
    metadata_bytes_max: 256 << 10,
    lone_surrogates: LoneSurrogates::Replace,
};

/// The paths that are measured.
#[derive(Clone, Copy)]
enum Path {
    /// Copies the bytes of JSON, for comparison.
    JsonCopy,
    /// Decodes JSON to trajectories.
    JsonDecode,
    /// Decodes JSON and packs it into the stored form.
    JsonPack,
    /// Decodes an Arrow stream to trajectories.
    ArrowDecode,
    /// Decodes an Arrow stream and packs it into the stored form.
    ArrowPack,
    /// Unpacks the stored form to segments.
    Unpack,
}

impl Path {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "json-copy" => Self::JsonCopy,
            "json-decode" => Self::JsonDecode,
            "json-pack" => Self::JsonPack,
            "arrow-decode" => Self::ArrowDecode,
            "arrow-pack" => Self::ArrowPack,
            "unpack" => Self::Unpack,
            _ => return None,
        })
    }
}

/// The inputs of all paths.
struct Bodies {
    json: Vec<u8>,
    arrow: Bytes,
    payloads: Vec<Payload>,
}

impl Bodies {
    fn new() -> anyhow::Result<Self> {
        let json = bodies::json();
        let sent = from_json(&json)?;
        let arrow = bodies::arrow(&sent)?.into();
        Ok(Self {
            json,
            arrow,
            payloads: pack(sent)?.into_iter().map(|rollout| rollout.form(Retries::default()).payload.clone()).collect(),
        })
    }

    fn go(&self, path: Path) -> anyhow::Result<()> {
        match path {
            Path::JsonCopy => drop(black_box(self.json.clone())),
            Path::JsonDecode => drop(black_box(from_json(&self.json)?)),
            Path::JsonPack => drop(black_box(pack(from_json(&self.json)?)?)),
            Path::ArrowDecode => drop(black_box(from_arrow(&self.arrow)?)),
            Path::ArrowPack => drop(black_box(pack(from_arrow(&self.arrow)?)?)),
            Path::Unpack => {
                for payload in &self.payloads {
                    drop(black_box(payload.unpack()?));
                }
            }
        }
        Ok(())
    }

    /// Number of bytes of a path's input.
    fn bytes(&self, path: Path) -> usize {
        match path {
            Path::JsonCopy | Path::JsonDecode | Path::JsonPack => self.json.len(),
            Path::ArrowDecode | Path::ArrowPack => self.arrow.len(),
            Path::Unpack => self.payloads.iter().map(|payload| payload.body.len()).sum(),
        }
    }
}

fn from_json(body: &[u8]) -> anyhow::Result<Vec<wire::Trajectory>> {
    parsers::decode_json(body, &LIMITS).map_err(|problem| anyhow!("{problem:?}"))
}

fn from_arrow(body: &Bytes) -> anyhow::Result<Vec<wire::Trajectory>> {
    parsers::decode_arrow(body.clone()).map_err(|problem| anyhow!("{problem:?}"))
}

/// Validates and packs, as ingest does.
fn pack(sent: Vec<wire::Trajectory>) -> anyhow::Result<Vec<NewRollout>> {
    let pack = |sent| {
        let parsed = Trajectory::parse(sent, &LIMITS).map_err(|found| anyhow!("{found:?}"))?;
        Ok(NewRollout::pack(parsed))
    };
    sent.into_iter().map(pack).collect()
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, times] = arguments.as_slice() else {
        // cargo passes this argument to every benchmark.
        println("decode PATH TIMES; `make bench NAME=instructions` runs it")?;
        return Ok(());
    };
    let path = Path::named(name).with_context(|| format!("there is no path `{name}`"))?;
    let times: usize = times.parse().context("how many times is a number")?;
    let bodies = Bodies::new()?;
    let mut spent = Vec::with_capacity(times);
    for _ in 0..times {
        let started = Instant::now();
        bodies.go(path)?;
        spent.push(started.elapsed());
    }
    spent.sort_unstable();
    let median = spent.get(times / 2).map_or(0, Duration::as_nanos);
    println(&format!("{} {} {median}", bodies::ROLLOUTS * bodies::TOKENS, bodies.bytes(path)))
}

fn println(line: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("cannot print")
}
