//! Claims of other sizes than the rules say, as the protocols of other buffers need them.

use std::collections::BTreeMap;

use forebay_domain::{
    batch::{BatchSize, PackedEnvironment, Packing},
    ids::{PolicyName, RequestId},
    lease::Batch,
};
use forebay_service::lease::{LeaseRequest, Leased};
use serde_json::{Value, json};

use crate::support::{TestApp, group, on_both_stores, rollout, with};

/// Posts groups of an environment with these numbers of rollouts.
async fn post(app: &TestApp, environment: &str, groups: &[(&str, usize)]) {
    for (name, rollouts) in groups {
        let members = (0..*rollouts).map(|at| {
            let label = json!({"group_id": name, "group_size": rollouts, "environment": environment});
            with(rollout(&format!("{name}-{at}"), 1.0), label)
        });
        app.accept(Value::Array(members.collect())).await;
    }
}

async fn claim(app: &TestApp, size: BatchSize) -> Option<Batch> {
    let leased = lease(app, LeaseRequest { size, ..LeaseRequest::of(PolicyName::default()) }).await;
    leased.map(|leased| leased.batch)
}

async fn lease(app: &TestApp, request: LeaseRequest) -> Option<Leased> {
    app.buffer.lease(request, || true).await.expect("the claim is valid")
}

async fn ids(app: &TestApp, batch: Option<Batch>) -> Vec<String> {
    let batch = batch.expect("there is a batch");
    app.group_ids(&json!({"samples_url": format!("/batches/{}/samples", batch.batch_id)})).await
}

fn samples(samples: u32, environments: &[(&str, u32, f64)]) -> BatchSize {
    let of = |(name, size, min_share): &(&str, u32, f64)| {
        ((*name).to_owned(), PackedEnvironment { group_size: Some(*size), min_share: *min_share })
    };
    BatchSize::Samples(Packing { samples, environments: environments.iter().map(of).collect::<BTreeMap<_, _>>() })
}

on_both_stores! {
    async fn a_claim_of_groups_takes_what_is_ready_in_order(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 16}})).await;
        assert!(claim(app, BatchSize::Groups { at_most: 3 }).await.is_none());
        for name in ["a", "b", "c", "d"] {
            app.accept(group(name, &[1.0, 0.0])).await;
        }
        app.post("/batches", json!({})).await.expect(204);
        let first = claim(app, BatchSize::Groups { at_most: 3 }).await;
        assert_eq!(ids(app, first).await, ["a", "b", "c"]);
        let rest = claim(app, BatchSize::Groups { at_most: u32::MAX }).await;
        assert_eq!(ids(app, rest).await, ["d"]);
    }

    async fn a_claim_of_rollouts_takes_whole_groups(app: TestApp) {
        post(app, "x", &[("a", 3), ("b", 2), ("c", 4)]).await;
        let first = claim(app, BatchSize::Rollouts { at_least: 4, at_most: u32::MAX }).await;
        assert_eq!(ids(app, first).await, ["a", "b"]);
        let five = BatchSize::Rollouts { at_least: 5, at_most: 100 };
        assert!(claim(app, five.clone()).await.is_none(), "4 of 5");
        let partial = LeaseRequest { size: five, partial: true, ..LeaseRequest::of(PolicyName::default()) };
        assert_eq!(ids(app, lease(app, partial).await.map(|leased| leased.batch)).await, ["c"]);
    }

    async fn the_lease_lasts_as_long_as_the_claim_says(app: TestApp) {
        app.rules("default", json!({"lease": {"ttl_s": 10}})).await;
        app.accept(rollout("a", 1.0)).await;
        let day = || LeaseRequest {
            ttl_s: Some(86_400),
            request_id: Some(RequestId::parse("read").expect("an id")),
            ..LeaseRequest::of(PolicyName::default())
        };
        let first = lease(app, day()).await.expect("a batch").batch;
        app.pass_s(86_000.0).await;
        let again = lease(app, day()).await.expect("a batch");
        assert!(again.held, "the lease lives");
        app.pass_s(86_000.0).await;
        assert!(lease(app, day()).await.expect("a batch").held, "and was renewed for a day");
        app.pass_s(86_500.0).await;
        let later = app.lease().await;
        assert_eq!((later["batch_id"].as_str(), &later["attempt"]), (Some(first.batch_id.to_string().as_str()), &json!(2)));
    }

    async fn an_exact_claim_has_that_many_samples_or_nothing(app: TestApp) {
        post(app, "x", &[("a", 3), ("b", 4), ("c", 2)]).await;
        assert!(claim(app, samples(8, &[])).await.is_none());
        post(app, "x", &[("d", 4)]).await;
        let eight = claim(app, samples(8, &[])).await;
        assert_eq!(eight.as_ref().map(|batch| (batch.groups, batch.samples)), Some((2, 8)));
        assert_eq!(ids(app, eight).await, ["b", "d"], "no group is split");
        let five = claim(app, samples(5, &[])).await;
        assert_eq!(ids(app, five).await, ["a", "c"]);
        app.post("/batches", json!({})).await.expect(204);
    }

    async fn odd_groups_of_an_environment_are_held_until_they_add_up(app: TestApp) {
        post(app, "odd", &[("a", 3)]).await;
        post(app, "even", &[("b", 4)]).await;
        let four = || samples(4, &[("odd", 4, 0.0), ("even", 4, 0.0)]);
        let first = claim(app, four()).await;
        assert_eq!(ids(app, first).await, ["b"]);
        assert!(claim(app, four()).await.is_none());
        assert!(claim(app, samples(3, &[("odd", 4, 0.0)])).await.is_none(), "3 is not the size of its groups");
        post(app, "odd", &[("c", 1)]).await;
        let second = claim(app, four()).await;
        assert_eq!(ids(app, second).await, ["a", "c"]);
    }

    async fn an_exact_claim_waits_for_the_minimum_of_an_environment(app: TestApp) {
        post(app, "rich", &[("a", 2), ("b", 2), ("c", 2)]).await;
        let four = || samples(4, &[("rich", 2, 0.0), ("poor", 2, 0.5)]);
        assert!(claim(app, four()).await.is_none());
        post(app, "poor", &[("d", 2)]).await;
        let first = claim(app, four()).await;
        assert_eq!(ids(app, first).await, ["a", "d"]);
    }

    async fn the_minimum_of_an_environment_is_found_far_behind_in_the_line(app: TestApp) {
        for hundred in 0..11 {
            let many: Vec<String> = (hundred * 100..(hundred + 1) * 100).map(|at| format!("rich{at}")).collect();
            post(app, "rich", &many.iter().map(|name| (name.as_str(), 1)).collect::<Vec<_>>()).await;
        }
        post(app, "poor", &[("poor", 1)]).await;
        let first = claim(app, samples(2, &[("poor", 1, 0.5)])).await;
        assert_eq!(ids(app, first).await, ["rich0", "poor"]);
    }

    async fn an_exact_claim_gets_only_a_returned_batch_of_its_size(app: TestApp) {
        post(app, "x", &[("a", 3), ("b", 4)]).await;
        let three = app.lease().await;
        app.nack(&three, &[]).await.expect(200);
        let four = claim(app, samples(4, &[])).await;
        assert_eq!(ids(app, four).await, ["b"], "the batch of 3 stays");
        assert!(claim(app, samples(4, &[])).await.is_none());
        let again = claim(app, samples(3, &[])).await;
        assert_eq!(again.map(|batch| batch.batch_id.to_string()).as_deref(), three["batch_id"].as_str());
    }
}
