//! The agents of the demo. Each rollout is a session: a solver answers a sum, a checker says whether it is right, and the
//! solver may try again. The team is scripted, and what it says is sampled from the two policies.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use forebay_client::{
    Client,
    wire::{AbortRequest, FinishRequest, SessionModel, SessionOpened, SessionRequest},
};
use serde_json::{Value, json};

use super::table::DIGITS;

/// The policy that answers sums.
pub(super) const SOLVER: &str = "solver";

/// The policy that says whether an answer is right.
pub(super) const CHECKER: &str = "checker";

/// Rollouts of a group.
pub(super) const GROUP_SIZE: u32 = 8;

/// One rollout of so many is a straggler, which finishes after its group was decided.
const STRAGGLER_IN: u32 = 60;

/// One rollout of so many breaks, as sandboxes do.
const CRASH_IN: u32 = 80;

/// Groups in a row of which no rollout succeeded, after which the demo gives up.
const FAILURES_MAX: u32 = 3;

/// The sums have summands below this.
const SUMMAND_MAX: u32 = 4;

/// The scores are of about so many of the last rollouts.
const SCORED: u32 = 100;

/// The share of the last rollouts that were right; older ones count less and less.
#[derive(Clone, Copy, Default)]
pub(super) struct Scores {
    rollouts: u32,
    pub(super) solver: f64,
    pub(super) checker: f64,
}

/// One member of the team, who plays one group after the other.
#[derive(Clone)]
pub(super) struct Agent {
    pub(super) name: String,
    pub(super) client: Client,
    pub(super) http: reqwest::Client,
    pub(super) scores: Arc<Mutex<Scores>>,
    /// How long a straggler waits.
    pub(super) straggle: Duration,
    /// What is added to every sum. It grows while the demo goes on, so that there is always something to learn.
    pub(super) shift: Arc<AtomicU32>,
}

impl Agent {
    /// Plays until the future is dropped. A rollout that fails is left to itself, as an agent that crashed would leave it.
    pub(super) async fn work(self) -> anyhow::Result<()> {
        let mut failures = 0;
        for number in 0.. {
            let group = format!("{}-{number}", self.name);
            let (first, second) = (rand::random_range(0..SUMMAND_MAX), rand::random_range(0..SUMMAND_MAX));
            let rollouts = (0..GROUP_SIZE).map(|place| self.play(&group, place, first, second));
            let played = futures::future::join_all(rollouts).await;
            failures = if played.iter().any(Result::is_ok) { 0 } else { failures + 1 };
            if failures == FAILURES_MAX {
                return played.into_iter().collect();
            }
        }
        Ok(())
    }

    /// Plays one rollout.
    async fn play(&self, group: &str, place: u32, first: u32, second: u32) -> anyhow::Result<()> {
        let model = |policy: &str| (policy.to_owned(), SessionModel { policy: Some(policy.to_owned()) });
        let request = SessionRequest {
            models: [model(SOLVER), model(CHECKER)].into(),
            rollout_id: Some(format!("{group}.{place}")),
            group_id: Some(group.to_owned()),
            group_size: Some(GROUP_SIZE),
            environment: Some("sums".to_owned()),
            ..SessionRequest::default()
        };
        let session = self.client.open_session(&request).await.context("a session cannot be opened")?;
        let sum = format!("{first} + {second}");
        let mut messages = vec![user(&format!("What is {sum}?"))];
        let mut answer = self.ask(&session, SOLVER, &messages).await?;
        if is_one_in(CRASH_IN) {
            let request = AbortRequest { reason: "sandbox-died".to_owned(), keep: false, attempt: None };
            self.client.abort_session(&session.session_id, &request).await.context("a session cannot be aborted")?;
            return Ok(());
        }
        let sum_now = (first + second + self.shift.load(Ordering::Relaxed)) % DIGITS.len() as u32;
        let is_right = |answer: &str| answer == sum_now.to_string();
        let verdict = self.ask(&session, CHECKER, &[user(&format!("Is {sum} = {answer}?"))]).await?;
        let was_judged = (verdict == "yes") == is_right(&answer);
        if verdict == "no" {
            messages.extend([json!({"role": "assistant", "content": answer}), user("no")]);
            answer = self.ask(&session, SOLVER, &messages).await?;
        }
        if is_one_in(STRAGGLER_IN) {
            tokio::time::sleep(self.straggle).await;
        }
        let reward = |is_earned: bool| if is_earned { 1.0 } else { 0.0 };
        let (solver, checker) = (reward(is_right(&answer)), reward(was_judged));
        self.note(solver, checker);
        let finish = FinishRequest {
            rewards: [(SOLVER.to_owned(), solver), (CHECKER.to_owned(), checker)].into(),
            ..FinishRequest::default()
        };
        self.client.finish_session(&session.session_id, &finish).await.context("a session cannot be finished")?;
        Ok(())
    }

    fn note(&self, solver: f64, checker: f64) {
        let mut scores = self.scores.lock().unwrap_or_else(PoisonError::into_inner);
        scores.rollouts = SCORED.min(scores.rollouts + 1);
        let share = 1.0 / f64::from(scores.rollouts);
        scores.solver += share * (solver - scores.solver);
        scores.checker += share * (checker - scores.checker);
    }

    /// One call of an agent, as any program with OpenAI's interface makes it.
    async fn ask(&self, session: &SessionOpened, policy: &str, messages: &[Value]) -> anyhow::Result<String> {
        let request =
            self.http.post(format!("{}/chat/completions", session.base_urls.openai)).bearer_auth(&session.key);
        let response = request.json(&json!({"model": policy, "messages": messages})).send().await?;
        let status = response.status();
        let answer: Value = response.json().await.context("an answer of the session is no JSON")?;
        let text = answer["choices"][0]["message"]["content"].as_str();
        Ok(text.with_context(|| format!("a call was answered with {status}: {answer}"))?.to_owned())
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn is_one_in(count: u32) -> bool {
    rand::random_range(0..count) == 0
}
