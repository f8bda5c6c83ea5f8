//! Runs histories one after another, until enough steps ran without a difference.

use std::{cell::RefCell, time::Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use tokio::runtime::Runtime;

use super::{
    coverage::Coverage,
    operation::{Sequence, sequences},
    reference::Reference,
    system::{Database, System},
    view::Call,
};
use crate::support::{Backend, endure};

/// The length of a run on one store.
struct Extent {
    /// Number of steps by default (less than a minute of unoptimised code), and in the long version.
    steps: (usize, usize),
    /// Number of steps between two comparisons of whole ledgers, because reading a ledger takes twenty queries. The
    /// last step of a history is always followed by a comparison.
    ledger_every: u64,
}

const SQLITE: Extent = Extent { steps: (22_000, 1_000_000), ledger_every: 4 };
const POSTGRES: Extent = Extent { steps: (1_500, 100_000), ledger_every: 10 };

/// Number of histories that are tried in order to shorten a failing one.
const SHRINKS_MAX: u32 = 1_000;

/// Number of differing lines that a failure shows.
const LINES_MAX: usize = 24;

#[test]
fn sqlite_agrees_with_the_reference_model() {
    run(Backend::Sqlite, &SQLITE);
}

#[test]
fn postgres_agrees_with_the_reference_model() {
    run(Backend::Postgres, &POSTGRES);
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

/// What a run has seen so far.
#[derive(Default)]
struct Progress {
    steps: u64,
    coverage: Coverage,
}

fn run(backend: Backend, extent: &Extent) {
    let steps = setting("FOREBAY_MODEL_STEPS");
    let is_default = steps.is_none();
    let steps = steps.unwrap_or(endure::size(extent.steps.0, extent.steps.1) as u64);
    // The seed of the first history; each following history has the next seed.
    let seed = endure::seed();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    let ledger_every = setting("FOREBAY_MODEL_LEDGER_EVERY").unwrap_or(extent.ledger_every);
    let database = runtime.block_on(Database::new(backend));
    let progress = RefCell::new(Progress::default());
    let started = Instant::now();
    let mut histories = 0;
    while progress.borrow().steps < steps {
        let bench = Bench { runtime: &runtime, database: &database, ledger_every, progress: &progress };
        bench.run_history(seed + histories);
        histories += 1;
    }
    let Progress { steps, coverage } = progress.into_inner();
    let elapsed_s = started.elapsed().as_secs();
    let outcome = format!("0 differences in {histories} histories, ledgers every {ledger_every} steps, {elapsed_s} s");
    endure::report(&format!("Model steps on {backend:?}"), steps as usize, &outcome);
    eprintln!("{coverage}");
    // Both stores run the same kind of histories, so the coverage of the longer run is enough.
    if is_default && backend == Backend::Sqlite {
        let missing = coverage.missing();
        assert!(missing.is_empty(), "never met: {missing:?}");
    }
}

/// The parts that histories run on.
struct Bench<'a> {
    runtime: &'a Runtime,
    database: &'a Database,
    ledger_every: u64,
    progress: &'a RefCell<Progress>,
}

impl Bench<'_> {
    /// Runs the history of one seed. If it shows a difference, finds a shorter history that does.
    fn run_history(&self, seed: u64) {
        let config = Config { cases: 1, failure_persistence: None, max_shrink_iters: SHRINKS_MAX, ..Config::default() };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
        let compare = |history: &Sequence| self.runtime.block_on(self.compare(history));
        match runner.run(&sequences(), |history| compare(&history).map_err(TestCaseError::fail)) {
            Ok(()) => {}
            Err(TestError::Fail(reason, failing)) => {
                let difference = shorten(failing, |shorter| compare(shorter).err())
                    .unwrap_or_else(|| format!("it failed once and not again, so there is a race: {reason}"));
                panic!("{difference}\nagain: FOREBAY_SEED={seed} FOREBAY_MODEL_STEPS=1")
            }
            Err(TestError::Abort(reason)) => panic!("seed {seed} makes no history: {reason}"),
        }
    }

    /// Runs a history on both sides. Returns the first difference and the calls before it.
    async fn compare(&self, history: &Sequence) -> Result<(), String> {
        let mut reference = Reference::new(history.rules.clone());
        let mut system = System::start(self.database).await;
        let rules = history.rules.iter().enumerate();
        let mut calls: Vec<Call> =
            rules.map(|(policy, rules)| Call::PutPolicy { policy, rules: rules.clone() }).collect();
        for call in &calls {
            system.apply(call).await;
        }
        let mut outcome = Ok(());
        for (place, operation) in history.operations.iter().enumerate() {
            let call = operation.resolve(&reference);
            calls.push(call.clone());
            outcome = self.step(&mut reference, &mut system, &call).await;
            let last = place + 1 == history.operations.len();
            if outcome.is_ok() && (last || (place as u64).is_multiple_of(self.ledger_every)) {
                outcome = compare_ledgers(&reference, &system).await;
            }
            if outcome.is_err() {
                break;
            }
        }
        system.stop().await;
        outcome.map_err(|difference| {
            let calls: Vec<String> = calls.iter().map(|call| format!("  {call:?}")).collect();
            format!("after these calls\n{}\n{difference}", calls.join("\n"))
        })
    }

    async fn step(&self, reference: &mut Reference, system: &mut System, call: &Call) -> Result<(), String> {
        let before = reference.clone();
        let expected = reference.apply(call);
        let found = system.apply(call).await;
        let mut progress = self.progress.borrow_mut();
        progress.steps += 1;
        progress.coverage.count(&before, call, &expected);
        if expected == found {
            return Ok(());
        }
        Err(format!("the answers differ\n{}", difference(&expected, &found)))
    }
}

async fn compare_ledgers(reference: &Reference, system: &System) -> Result<(), String> {
    let found = system.ledger().await.map_err(|error| format!("the ledger cannot be read: {error}"))?;
    let expected = reference.ledger();
    if expected == found {
        return Ok(());
    }
    Err(format!("the ledgers differ\n{}", difference(&expected, &found)))
}

/// Removes every operation without which a failing history still fails; proptest tries each operation once before it
/// simplifies the others. `None` if the history does not fail again.
fn shorten(mut failing: Sequence, difference_of: impl Fn(&Sequence) -> Option<String>) -> Option<String> {
    let mut difference = difference_of(&failing)?;
    let mut place = failing.operations.len();
    while place > 0 {
        place -= 1;
        let mut shorter = failing.clone();
        shorter.operations.remove(place);
        if let Some(still) = difference_of(&shorter) {
            (failing, difference) = (shorter, still);
            place = failing.operations.len();
        }
    }
    Some(difference)
}

/// The lines in which two things differ, side by side.
fn difference(expected: &impl std::fmt::Debug, found: &impl std::fmt::Debug) -> String {
    let (expected, found) = (format!("{expected:#?}"), format!("{found:#?}"));
    let (mut expected, mut found) = (expected.lines(), found.lines());
    let mut lines = Vec::new();
    for number in 1.. {
        match (expected.next(), found.next()) {
            (None, None) => break,
            (expected, found) if expected == found => {}
            (expected, found) => lines.push(format!(
                "  line {number}: expected {:?}, found {:?}",
                expected.unwrap_or_default().trim(),
                found.unwrap_or_default().trim()
            )),
        }
    }
    lines.truncate(LINES_MAX);
    lines.join("\n")
}
