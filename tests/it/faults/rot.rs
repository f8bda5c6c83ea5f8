//! Bit rot: one bit of the database file or of a segment file is flipped while the service is stopped. Afterwards every delivered rollout is
//! what was posted, or it is not delivered.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use super::database;
use crate::support::{endure, group, process::Service, text, with_image};

const GROUPS: usize = 12;

/// The folder of the segment files.
const SEGMENTS: &str = "forebay.db-segments";

/// The files of a database by their names in its folder.
type Files = Vec<(PathBuf, Vec<u8>)>;

/// Fills a database and reads what it delivers. Returns the files after the service has stopped, and the rows by rollout
/// and segment.
async fn intact(folder: &Path) -> (Files, BTreeMap<String, Value>) {
    let http = crate::support::http();
    let service = Service::start(&database(folder)).await;
    let rules = json!({"group": {"size": 2}, "retention": {"trained_s": 1_000_000}});
    http.put(format!("{}/policies/default", service.url)).json(&rules).send().await.expect("the service answers");
    for index in 0..GROUPS {
        let mut bundle = group(&format!("g{index}"), &[index as f64, 1.0 - index as f64]);
        for (place, rollout) in bundle.as_array_mut().expect("a bundle").iter_mut().enumerate() {
            // There are enough rollouts that most of the file is payload, as in real databases.
            let tokens: Vec<usize> = (0..600).map(|token| token * 7919 % (1_000 + index + place)).collect();
            let logprobs: Vec<f64> = (1..600).map(|token| -1.0 / f64::from(token)).collect();
            rollout["segments"] = json!([{"tokens": tokens, "loss_mask": vec![1; 599], "logprobs": logprobs}]);
            let image: Vec<u8> = (0..3_000).map(|at| (at * (index + 2)) as u8).collect();
            rollout["messages"] = with_image(&image)["messages"].take();
        }
        let sent = http.post(format!("{}/trajectories", service.url)).json(&bundle).send().await;
        assert_eq!(sent.expect("the service answers").status(), 201);
    }
    assert!(service.stop().await.success());
    let mut files = vec![PathBuf::from("forebay.db")];
    for entry in std::fs::read_dir(folder.join(SEGMENTS)).expect("the folder is there") {
        files.push(Path::new(SEGMENTS).join(entry.expect("it can be read").file_name()));
    }
    let read = |name: PathBuf| (name.clone(), std::fs::read(folder.join(name)).expect("the file is there"));
    let files: Files = files.into_iter().map(read).collect();
    assert_eq!(files.len(), 2);
    let service = Service::start(&database(folder)).await;
    let rows = delivered(&http, &service.url).await;
    assert_eq!(rows.len(), 4 * GROUPS, "rows and images");
    service.kill().await;
    (files, rows)
}

/// Leases and reads everything; errors count as answers.
async fn delivered(http: &reqwest::Client, url: &str) -> BTreeMap<String, Value> {
    let mut rows = BTreeMap::new();
    for _ in 0..4 * GROUPS {
        let response = http.post(format!("{url}/batches")).json(&json!({})).send().await.expect("the service answers");
        if response.status() == 204 {
            break;
        }
        if response.status() != 201 {
            continue;
        }
        let batch: Value = response.json().await.expect("a descriptor");
        let read = http.get(format!("{url}{}", text(&batch["samples_url"]))).send().await;
        let read = read.expect("the service answers");
        if read.status() != 200 {
            continue;
        }
        // A stream that breaks off has delivered lines, which a client must not use.
        let Ok(body) = read.text().await else { continue };
        for line in body.lines() {
            let row: Value = serde_json::from_str(line).expect("every line is a row");
            let image =
                row["messages"][0]["content"][0]["image_url"]["url"].as_str().and_then(|url| url.split_once(':'));
            let image = http.get(format!("{url}/media/{}", image.expect("the image is an upload").1)).send().await;
            let image = image.expect("the service answers");
            if image.status() == 200
                && let Ok(image) = image.bytes().await
            {
                rows.insert(format!("image {}", text(&row["rollout_id"])), json!(image.to_vec()));
            }
            rows.insert(format!("{} {}", text(&row["rollout_id"]), row["segment"]), row);
        }
    }
    rows
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_is_never_delivered() {
    let (seed, flips) = (endure::seed(), endure::size(40, 2_000));
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (files, expected) = intact(folder.path()).await;
    let http = crate::support::http();
    let mut random = StdRng::seed_from_u64(seed);
    let (mut refused, mut partly, mut whole) = (0, 0, 0);
    for flip in 0..flips {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let which = random.random_range(0..files.len());
        let (place, bit) = (random.random_range(0..files[which].1.len()), random.random_range(0..8_u32));
        std::fs::create_dir(folder.path().join(SEGMENTS)).expect("the folder is new");
        for (index, (name, bytes)) in files.iter().enumerate() {
            let mut bytes = bytes.clone();
            if index == which {
                bytes[place] ^= 1 << bit;
            }
            std::fs::write(folder.path().join(name), bytes).expect("the file can be written");
        }
        let Ok(mut service) = Service::try_start(&database(folder.path()), &[]).await else {
            refused += 1;
            continue;
        };
        let rows = delivered(&http, &service.url).await;
        for (row, found) in &rows {
            let at = format!("flip {flip} of seed {seed}: bit {bit} of byte {place} of file {which}");
            assert_eq!(Some(found), expected.get(row), "{at} was delivered");
        }
        assert!(service.runs(), "it ended: {}", service.log());
        let all = rows.len() == expected.len();
        *(if all { &mut whole } else { &mut partly }) += 1;
        service.kill().await;
    }
    let outcome = format!("{whole} harmless, {partly} kept from delivery, {refused} kept from serving");
    endure::report("Bits flipped in the database file or a segment file", flips, &outcome);
}
