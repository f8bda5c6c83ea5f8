//! What a session adds to a life: the ledger does not know a rollout before its session ends, nor why it ended.

use forebay_domain::{
    clock::Timestamp,
    ids::PolicyName,
    looking::explain::sentence::{duration_us, is, plural},
    session::Session,
    states::{GroupState, SessionState},
};

use super::{IdKind, LifeStory, Telling};

/// The life of a session whose rollout the ledger does not have.
pub(super) fn alone(session: &Session, policy: PolicyName, now: Timestamp) -> LifeStory {
    let mut telling = Telling { steps: Vec::new(), headline: String::new(), now };
    steps(&mut telling, session);
    LifeStory {
        kind: IdKind::Session,
        policy,
        at: now,
        state: session.state.as_str(),
        headline: telling.headline,
        steps: telling.steps,
        see: format!("./sessions/{}", session.session_id),
        also: Vec::new(),
    }
}

/// The life of a group that has no rollout yet, because all of its sessions are open.
pub(super) fn group(sessions: i64, policy: PolicyName, now: Timestamp) -> LifeStory {
    let mut telling = Telling { steps: Vec::new(), headline: String::new(), now };
    let open = plural(sessions, "session");
    telling.tell("open", None, format!("Waits: {open} of the group {} open, and no rollout has arrived", is(sessions)));
    LifeStory {
        kind: IdKind::Group,
        at: now,
        state: GroupState::Open.as_str(),
        headline: telling.headline,
        steps: telling.steps,
        see: format!("./sessions?policy={policy}&state=open"),
        policy,
        also: Vec::new(),
    }
}

/// Tells how a session went.
pub(super) fn steps(telling: &mut Telling, session: &Session) {
    telling.tell("session-opened", Some(session.opened_at), format!("Session {} was opened", session.session_id));
    let calls = plural(i64::from(session.calls), "call");
    if session.attempt > 1 {
        let text = format!("Its agent was started again: attempt {} of {}", session.attempt, session.max_attempts);
        telling.tell("session-resumed", None, text);
    }
    let reason = session.reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    match session.state {
        SessionState::Open => {
            let until = session.due_at.map_or_else(String::new, |at| {
                let left = duration_us(at.micros_since(telling.now).max(0));
                let then = if session.attempt < session.max_attempts { "is parked" } else { "expires" };
                format!("; it {then} in {left} unless a call comes or somebody finishes it")
            });
            telling.tell("session-open", None, format!("Waits: its session is open with {calls}{until}"));
        }
        SessionState::Parked => {
            let left = duration_us(session.expires_at.micros_since(telling.now).max(0));
            let text = format!(
                "Waits: its session is parked with {calls}, because its agent makes none; somebody can resume it for {left}, \
                 unless another rollout needs its room"
            );
            telling.tell("session-parked", None, text);
        }
        SessionState::Finishing => {
            telling.tell("session-finishing", None, "Waits: its session is being finished".to_owned());
        }
        SessionState::Finished => {
            telling.tell("session-finished", session.ended_at, format!("The session was finished with {calls}"));
        }
        SessionState::Aborted => {
            telling.tell(
                "session-aborted",
                session.ended_at,
                format!("The session was aborted{reason} with {calls}, without a reward"),
            );
        }
        SessionState::Expired => {
            let ended = session.ended_at.unwrap_or(session.expires_at);
            let why = if ended >= session.expires_at {
                format!("it had lasted for {} (`ttl_s`)", duration_us(ended.micros_since(session.opened_at).max(0)))
            } else {
                let last = session.last_call_at.unwrap_or(session.opened_at);
                let silence = duration_us(ended.micros_since(last).max(0));
                let parked = session.attempt < session.max_attempts;
                let then = if parked { ", and another rollout needed the room of the parked session" } else { "" };
                format!("no call had come for {silence} (`idle_s`){then}")
            };
            let text = format!("The session expired with {calls}, before anybody gave a reward: {why}");
            telling.tell("session-expired", session.ended_at, text);
        }
    }
}
