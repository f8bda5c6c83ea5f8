//! The history of a policy against its tallies: what the buckets of a series have adds up to what was counted, whenever
//! snapshots were taken or thinned out.

use forebay_domain::{
    clock::{Clock as _, Timestamp},
    looking::history::{Metric, SeriesRequest},
    states::Verdict,
    tally::{LeaseEvent, Tallies, Tally},
};
use forebay_service::error::BufferError;

use super::{ALL, PolicyNumber, StoryFilter, System, policy_name};

/// The most buckets that a check asks for.
const BUCKETS: i64 = 1_900;

/// Tallies whose counts are shown as they are.
const COUNTS: [(&str, Tally); 8] = [
    ("received", Tally::Received),
    ("masked", Tally::Masked),
    ("late", Tally::LateTotal),
    ("decided_ready", Tally::DecidedReady),
    ("stale_groups", Tally::Stale),
    ("acked_batches", Tally::Acked),
    ("acked_rollouts", Tally::AckedRollouts),
    ("lease_expired", Tally::Leases(LeaseEvent::Expired)),
];

/// Tallies whose amounts are shown as they are.
const AMOUNTS: [(&str, Tally); 2] = [("tokens_received", Tally::Received), ("acked_tokens", Tally::Acked)];

/// Tallies whose numbers at the end of a bucket are shown.
const GAUGES: [(&str, Tally); 2] = [("live_bytes", Tally::LiveBytes), ("reserved", Tally::Reserved)];

impl System {
    /// Compares the whole history of a policy with its tallies now.
    #[expect(clippy::float_cmp, reason = "sums of whole numbers are exact")]
    pub(super) async fn check_history(&self, number: PolicyNumber, tallies: &Tallies) -> Result<(), BufferError> {
        let now = self.clock.now();
        let minutes = now.micros_since(self.started) / 60_000_000 + 2;
        let names = COUNTS.iter().chain(&AMOUNTS).chain(&GAUGES).map(|(name, _)| *name);
        let names = names.chain(["kept", "dropped", "dropped.*", "discarded.*", "version"]);
        let request = SeriesRequest {
            policy: policy_name(number),
            from: Some(self.started),
            to: Some(Timestamp::from_micros(now.as_micros() + 60_000_000)),
            step: minutes / BUCKETS + 1,
            metrics: names.map(|name| Metric::parse(name).expect("it is one")).collect(),
        };
        let columns = self.buffer.series(request).await?.columns;
        let sum = |name: &str| columns.get(name).map_or(0.0, |values| values.iter().flatten().sum::<f64>());
        let sum_of = |family: &str| {
            let of_family =
                columns.keys().filter(|name| name.strip_prefix(family).is_some_and(|rest| rest.starts_with('.')));
            of_family.map(|name| sum(name)).sum::<f64>()
        };
        for (name, tally) in &COUNTS {
            assert_eq!(sum(name), tallies.count(tally) as f64, "{name} of policy {number}: {:?}", columns[*name]);
        }
        for (name, tally) in &AMOUNTS {
            assert_eq!(sum(name), tallies.amount(tally), "{name} of policy {number}: {:?}", columns[*name]);
        }
        for (name, tally) in &GAUGES {
            let last = columns[*name].last().copied().flatten();
            assert_eq!(last, Some(tallies.count(tally) as f64), "{name} of policy {number}");
        }
        let amounts = tallies.amounts.iter().filter(|(tally, _)| matches!(tally, Tally::Dropped(_)));
        assert_eq!(sum_of("dropped"), amounts.map(|(_, amount)| amount).sum::<f64>(), "policy {number}");
        let counts = tallies.counts.iter().filter(|(tally, _)| matches!(tally, Tally::Discarded(_)));
        assert_eq!(sum_of("discarded"), counts.map(|(_, count)| *count as f64).sum::<f64>(), "policy {number}");
        // As long as nothing is forgotten, the verdicts of all rollouts are in the ledger.
        if tallies.count(&Tally::Forgotten) == 0 {
            let filter = StoryFilter { policy: Some(policy_name(number)), limit: ALL, ..StoryFilter::default() };
            let stories = self.buffer.stories(filter, |_| true).await?.entries;
            for (name, verdict) in [("kept", Verdict::Kept), ("dropped", Verdict::Dropped)] {
                let found = stories.iter().filter(|story| story.verdict == verdict).count();
                assert_eq!(sum(name), found as f64, "{name} of policy {number}: {:?}", columns[name]);
            }
        }
        Ok(())
    }
}
