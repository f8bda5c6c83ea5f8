//! Uploads that messages name: what is stored once, by parts, checked, kept as long as a rollout names it, and read by
//! range.

use std::{path::Path, process::Output};

use forebay_store::ops::blobs::RetireBlobs;
use futures::StreamExt as _;
use reqwest::{Method, StatusCode, header};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::{
    Answer, TestApp, endure, group, http, member, on_both_stores, process::Service, rollout, with, with_image,
};

const MIB: usize = 1 << 20;

const DAY_S: f64 = 86_400.0;

/// Bytes that no part of repeats another, for each seed.
pub(crate) fn bytes(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// A message with images.
fn naming(digests: &[&str]) -> Value {
    let image = |digest: &&str| json!({"type": "image_url", "image_url": {"url": format!("forebay:{digest}")}});
    json!({"messages": [{"role": "user", "content": digests.iter().map(image).collect::<Vec<_>>()}]})
}

async fn put_to(url: &str, digest: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Answer {
    let mut request = http().put(format!("{url}/media/{digest}")).body(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.expect("the server answers");
    let status = answer.status();
    Answer { status, json: answer.json().await.unwrap_or(Value::Null) }
}

async fn put(app: &TestApp, body: &[u8]) -> Answer {
    put_to(&app.url, &digest(body), &[("content-type", "image/png")], body.to_vec()).await
}

/// Sends some of the bytes of a whole.
async fn put_range(url: &str, whole: &[u8], range: std::ops::Range<usize>) -> Answer {
    let sent = format!("bytes {}-{}/{}", range.start, range.end - 1, whole.len());
    put_to(url, &digest(whole), &[("content-range", &sent)], whole[range].to_vec()).await
}

/// How many bytes of a whole are stored.
async fn stored(url: &str, whole: &[u8]) -> Value {
    let asked = format!("bytes */{}", whole.len());
    let answer = put_to(url, &digest(whole), &[("content-range", &asked)], Vec::new()).await;
    assert!(matches!(answer.status.as_u16(), 200 | 202), "{answer:?}");
    answer.json["stored"].clone()
}

async fn get(url: &str, digest: &str, range: Option<&str>) -> (StatusCode, header::HeaderMap, Vec<u8>) {
    let mut request = http().get(format!("{url}/media/{digest}"));
    if let Some(range) = range {
        request = request.header("range", range);
    }
    let answer = request.send().await.expect("the server answers");
    let (status, headers) = (answer.status(), answer.headers().clone());
    (status, headers, answer.bytes().await.expect("the answer is whole").to_vec())
}

async fn is_there(app: &TestApp, bytes: &[u8]) -> bool {
    let (status, _, found) = get(&app.url, &digest(bytes), None).await;
    if status == 404 {
        return false;
    }
    assert_eq!((status.as_u16(), found == bytes), (200, true));
    true
}

on_both_stores! {
    async fn data_urls_become_uploads(app: TestApp) {
        let image = bytes(50, 2 * MIB + 3);
        let name = digest(&image);
        app.rules("default", json!({"group": {"size": 2}})).await;
        for (index, reward) in [1.0, 0.0].into_iter().enumerate() {
            app.accept(with(member("g", index, reward), with_image(&image))).await;
        }
        let named = format!("forebay:{name}");
        let again = app.post("/trajectories", with(member("g", 0, 1.0), naming(&[&name]))).await.expect(200);
        assert_eq!(again["duplicate"], true, "the address stands for the same content");
        let (status, headers, found) = get(&app.url, &name, None).await;
        assert_eq!((status.as_u16(), &headers["content-type"], found == image), (200, &header::HeaderValue::from_static("image/png"), true));
        let batch = app.lease().await;
        for sample in app.samples(&batch).await {
            assert_eq!(sample["messages"], naming(&[&name])["messages"]);
        }
        assert_eq!(app.read_value("SELECT COUNT(*) FROM blob".to_owned()).await, 1);
        // Without a digest, by who has none.
        let posted = app.post_raw("/media", &[("content-type", "image/png")], image.clone()).await.expect(200);
        assert_eq!((&posted["url"], &posted["expires_at"]), (&json!(named), &Value::Null));
        let other = app.post_raw("/media", &[("content-type", "audio/wav")], &b"sound"[..]).await.expect(201);
        assert_eq!(other["digest"], digest(b"sound"));
        app.post_raw("/media", &[], Vec::new()).await.refused(422, "invalid");
    }

    async fn an_upload_stays_as_long_as_a_rollout_names_it(app: TestApp) {
        let (image, other) = (bytes(1, 3_000), bytes(2, 5_000));
        let answer = put(app, &image).await.expect(201);
        let name = digest(&image);
        assert_eq!((&answer["digest"], &answer["bytes"], &answer["stored"]), (&json!(name), &json!(3_000), &json!(3_000)));
        assert_eq!((&answer["url"], &answer["expires_at"]), (&json!(format!("forebay:{name}")), &json!("2026-01-02T00:00:00.000000Z")));
        put(app, &other).await.expect(201);
        app.rules("default", json!({"group": {"size": 1}, "retention": {"settled_s": 3_600}})).await;
        for rollout_id in ["a", "b"] {
            app.accept(with(rollout(rollout_id, 1.0), naming(&[&name, &name]))).await;
        }
        assert_eq!(put(app, &image).await.expect(200)["expires_at"], Value::Null, "a rollout names it");
        app.pass_s(2.0 * DAY_S).await;
        assert!(is_there(app, &image).await);
        assert!(!is_there(app, &other).await, "nobody named it for a day");

        let (_, headers, _) = get(&app.url, &name, None).await;
        assert_eq!(headers["content-type"], "image/png");
        assert_eq!(headers["content-security-policy"], "sandbox; default-src 'none'; frame-ancestors 'none'");
        let known = app.http.get(format!("{}/media/{name}", app.url)).header("if-none-match", &headers["etag"]).send().await;
        assert_eq!(known.expect("the server answers").status(), 304);

        // The payload of one rollout is purged, then that of the other.
        for (step, remains) in [(1, true), (2, false)] {
            let batch = app.lease().await;
            app.ack(&batch, step).await.expect(200);
            app.checkpoint(step).await;
            app.pass_s(3_601.0).await;
            // The sweep that purges notes that it may be due, and the next one finds out.
            app.pass_s(1.0).await;
            assert_eq!(is_there(app, &image).await, remains, "{step}");
        }
        put(app, &image).await.expect(201);
    }

    async fn an_upload_goes_on_where_it_broke_off(app: TestApp) {
        let image = bytes(3, 5 * MIB + 7);
        let name = digest(&image);
        let of = |answer: Answer, status| answer.expect(status)["stored"].clone();
        assert_eq!(stored(&app.url, &image).await, 0);
        assert_eq!(of(put_range(&app.url, &image, 0..2 * MIB).await, 202), 2 * MIB);
        assert_eq!(get(&app.url, &name, None).await.0, 404, "it is not whole");
        // What is not a whole MiB is sent again, and what is stored is passed over.
        assert_eq!(of(put_range(&app.url, &image, MIB..3 * MIB + 100).await, 202), 3 * MIB);
        assert_eq!(of(put_range(&app.url, &image, 3 * MIB..3 * MIB + 100).await, 202), 3 * MIB);
        assert_eq!(of(put_range(&app.url, &image, 0..MIB).await, 202), 3 * MIB);
        let gap = put_range(&app.url, &image, 4 * MIB..5 * MIB).await.refused(409, "upload-gap");
        assert_eq!(gap["detail"], format!("{} bytes are stored, and these begin with byte {}", 3 * MIB, 4 * MIB));
        assert_eq!(stored(&app.url, &image).await, 3 * MIB);
        let rollout = with(rollout("a", 1.0), naming(&[&name]));
        app.post("/trajectories", rollout.clone()).await.refused(422, "invalid");
        assert_eq!(of(put_range(&app.url, &image, 3 * MIB..image.len()).await, 201), image.len());
        assert!(is_there(app, &image).await);
        assert_eq!(of(put(app, &image).await, 200), image.len());
        app.accept(rollout).await;

        // The whole, when a part is there.
        let other = bytes(4, 9 * MIB);
        assert_eq!(of(put_range(&app.url, &other, 0..MIB).await, 202), MIB);
        assert_eq!(of(put(app, &other).await, 201), other.len());
        assert!(is_there(app, &other).await);

        for (asked, range) in [
            ("bytes=0-0", 0..1),
            ("bytes=1048570-1048580", MIB - 6..MIB + 5),
            ("bytes=5242880-", 5 * MIB..image.len()),
            ("bytes=-3145730", image.len() - 3 * MIB - 2..image.len()),
        ] {
            let (status, headers, found) = get(&app.url, &name, Some(asked)).await;
            let content_range = format!("bytes {}-{}/{}", range.start, range.end - 1, image.len());
            assert_eq!((status.as_u16(), &headers["content-range"]), (206, &header::HeaderValue::try_from(content_range).expect("digits")));
            assert!(found == image[range], "{asked}");
        }
        assert_eq!(get(&app.url, &name, Some("bytes=9999999-")).await.0, 416);
        assert_eq!(get(&app.url, &name, Some("rows=0-1")).await.0, 200, "an unknown unit is ignored");
        let head = app.http.head(format!("{}/media/{name}", app.url)).send().await.expect("the server answers");
        assert_eq!((head.status().as_u16(), &head.headers()["content-length"]), (200, &header::HeaderValue::from(image.len())));
    }

    async fn bytes_that_have_another_digest_leave_nothing(app: TestApp) {
        for length in [1_000, MIB, 3 * MIB + 5] {
            let image = bytes(5, length);
            let mut wrong = image.clone();
            wrong[length / 2] ^= 1;
            put_to(&app.url, &digest(&image), &[], wrong.clone()).await.refused(422, "digest-mismatch");
            assert_eq!(stored(&app.url, &image).await, 0, "{length}");
            // An upload that announces another length is another one, which can never be whole.
            put_to(&app.url, &digest(&image), &[("content-range", &format!("bytes 0-{}/{}", length - 1, 2 * length))], image.clone()).await;
            put(app, &image).await.expect(201);
            put_to(&app.url, &digest(&image), &[], [&image[..], b"x"].concat()).await.refused(422, "digest-mismatch");
            assert!(is_there(app, &image).await);
        }
        assert_eq!(app.read_value("SELECT COUNT(*) FROM blob WHERE stored = bytes".to_owned()).await, 3);
    }

    async fn a_rollout_is_refused_if_what_it_names_is_not_here(app: TestApp) {
        let (image, absent) = (bytes(6, 100), bytes(7, 100));
        put(app, &image).await.expect(201);
        let (image, absent) = (digest(&image), digest(&absent));
        let detail = format!(
            "names `forebay:{absent}`, which is not here: upload it whole with PUT /media/{absent} first, and not more than a day \
             before the rollout"
        );
        let refused = app.post("/trajectories", with(rollout("a", 1.0), naming(&[&image, &absent]))).await.refused(422, "invalid");
        assert_eq!(refused["errors"], json!([{"pointer": "/messages", "detail": detail}]));
        let bundle = json!([with(member("g", 0, 1.0), naming(&[&image])), with(member("g", 1, 0.0), naming(&[&absent]))]);
        assert_eq!(app.post("/trajectories", bundle).await.pointers(422), ["/1/messages"]);
        app.get("/trajectories?rollout_id=g-0").await.refused(404, "not-found");
        // What a model wrote names nothing.
        let text = json!({"messages": [{"role": "assistant", "content": format!("forebay:{absent}")}]});
        app.accept(with(rollout("b", 1.0), text)).await;
        let many: Vec<String> = (0..1_025_u32).map(|number| digest(&number.to_le_bytes())).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(app.post("/trajectories", with(rollout("c", 1.0), naming(&many))).await.pointers(422), ["/messages"]);
        // A repeated post is answered as the first one.
        let first = with(rollout("d", 1.0), naming(&[&image]));
        app.rules("default", json!({"group": {"size": 1}, "retention": {"settled_s": 0}})).await;
        app.accept(first.clone()).await;
        for step in [1, 2] {
            let batch = app.lease().await;
            app.ack(&batch, step).await.expect(200);
        }
        app.checkpoint(2).await;
        app.pass_s(2.0 * DAY_S).await;
        app.pass_s(1.0).await;
        assert_eq!(get(&app.url, &image, None).await.0, 404);
        assert_eq!(app.post("/trajectories", first).await.expect(200)["duplicate"], true);
    }

    async fn dropped_and_discarded_rollouts_give_back_what_they_name(app: TestApp) {
        let images: Vec<Vec<u8>> = (0..3).map(|seed| bytes(10 + seed, 100)).collect();
        for image in &images {
            put(app, image).await.expect(201);
        }
        let filter = json!([{"name": "bad", "scope": "rollout", "when": "reward < 0.0", "action": "drop"}]);
        let retention = json!({"dropped_s": 0});
        app.rules("default", json!({"group": {"size": 2}, "filter": filter, "retention": retention})).await;
        app.accept(with(member("f", 0, -1.0), naming(&[&digest(&images[0])]))).await;
        app.accept(with(member("g", 0, 1.0), naming(&[&digest(&images[1])]))).await;
        for (index, reward) in [1.0, 0.0].into_iter().enumerate() {
            app.accept(with(member("h", index, reward), naming(&[&digest(&images[2])]))).await;
        }
        app.post("/groups/discard", json!({"group_id": "g", "reason": "test"})).await.expect(200);
        app.pass_s(2.0 * DAY_S).await;
        app.pass_s(1.0).await;
        let mut there = Vec::new();
        for image in &images {
            there.push(is_there(app, image).await);
        }
        // Group `h` is ready, and nobody has consumed it.
        assert_eq!(there, [false, false, true]);
    }

    async fn heads_that_say_something_else_are_refused(app: TestApp) {
        let image = bytes(8, 100);
        let name = digest(&image);
        let send = async |name: &str, headers: &[(&str, &str)]| put_to(&app.url, name, headers, image.clone()).await;
        let upper = name.to_uppercase();
        assert_eq!(send(&upper, &[]).await.pointers(422), ["digest"]);
        assert_eq!(send("x", &[]).await.pointers(422), ["digest"]);
        send(&name, &[("content-encoding", "gzip")]).await.refused(415, "unsupported-media-type");
        send(&name, &[("content-type", "application/x-www-form-urlencoded")]).await.refused(415, "unsupported-media-type");
        send(&name, &[("content-type", "png")]).await.refused(415, "unsupported-media-type");
        for range in ["bytes 0-98/100", "bytes 1-100/100", "bytes */100", "bytes 0-99/*", "items 0-99/100"] {
            send(&name, &[("content-range", range)]).await.refused(400, "malformed");
        }
        send(&name, &[("content-range", "bytes 0-99/99999999999")]).await.refused(413, "too-large");
        put_to(&app.url, &digest(b""), &[("content-range", "bytes */0")], Vec::new()).await.refused(422, "invalid");
        let unknown = reqwest::Body::wrap_stream(futures::stream::iter([Ok::<_, std::io::Error>(image.clone())]));
        let chunked = app.http.put(format!("{}/media/{name}", app.url)).body(unknown).send().await;
        assert_eq!(chunked.expect("the server answers").status(), 411);
        assert_eq!(get(&app.url, &name, None).await.0, 404);
        app.call(Method::DELETE, &format!("/media/{name}"), None).await.refused(405, "method-not-allowed");
    }

    async fn posts_and_the_sweep_agree_about_uploads_that_are_due(app: TestApp) {
        let images: Vec<Vec<u8>> = (0..48).map(|seed| bytes(100 + seed, 2_000)).collect();
        for image in &images {
            put(app, image).await.expect(201);
        }
        app.clock.advance_s(DAY_S + 1.0);
        let named = |image: &Vec<u8>| with(rollout(&digest(image), 1.0), naming(&[&digest(image)]));
        let posts = futures::future::join_all(images.iter().map(|image| app.post("/trajectories", named(image))));
        // One after the other, so that some are deleted before their posts and others are named before.
        let retire = async {
            while app.buffer.store().write(RetireBlobs { now: app.buffer.now(), limit: 1 }).await.expect("answered") > 0 {}
        };
        let (posted, ()) = tokio::join!(posts, retire);
        app.pass_s(1.0).await;
        for (image, posted) in images.iter().zip(posted) {
            match posted.status.as_u16() {
                201 => assert!(is_there(app, image).await, "a rollout names it"),
                422 => assert!(!is_there(app, image).await, "it was deleted"),
                _ => panic!("{posted:?}"),
            }
        }
    }

    async fn there_is_a_bound_for_what_nobody_names(app: TestApp) {
        let insert = "INSERT INTO blob (digest, bytes, stored, kept_until_us, expires_us)
            SELECT digest, 17179869184, 17179869184, 9000000000000000, 9000000000000000
            FROM payload
            WHERE rollout_pk > 0";
        app.accept(rollout("a", 1.0)).await;
        assert_eq!(app.tamper(insert).await, 1);
        let image = bytes(60, 100);
        let refused = put(app, &image).await.refused(503, "too-many-uploads");
        assert_eq!(refused["retry_after_s"], 1);
        app.post("/trajectories", with(rollout("b", 1.0), with_image(&image))).await.refused(503, "too-many-uploads");
        app.tamper("DELETE FROM blob").await;
    }

    async fn what_a_rollout_names_counts_in_the_backlog(app: TestApp) {
        let image = bytes(61, 300_000);
        put(app, &image).await.expect(201);
        app.rules("default", json!({"group": {"size": 2}, "backlog": {"max_bytes": 1_000_000}})).await;
        for group_id in ["a", "b"] {
            for (index, reward) in [1.0, 0.0].into_iter().enumerate() {
                app.accept(with(member(group_id, index, reward), naming(&[&digest(&image)]))).await;
            }
        }
        app.post("/trajectories", member("c", 0, 1.0)).await.refused(429, "backlog-full");
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.checkpoint(1).await;
        app.post("/trajectories", member("c", 0, 1.0)).await.expect(201);
    }

    async fn a_damaged_piece_is_noticed_by_readers_and_by_the_doctor(app: TestApp) {
        let image = bytes(9, 2 * MIB);
        put(app, &image).await.expect(201);
        let damage = "UPDATE payload SET digest = (SELECT digest FROM blob) WHERE rollout_pk < 0 AND -rollout_pk % 4096 = 1";
        assert_eq!(app.damage(damage).await, 1);
        let (status, _, _) = get(&app.url, &digest(&image), None).await;
        assert_eq!(status, 500);
        let (status, _, found) = get(&app.url, &digest(&image), Some("bytes=0-99")).await;
        assert_eq!((status.as_u16(), found == image[..100]), (206, true), "the first piece is as it was");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_take_parts_of_one_upload() {
    let app = TestApp::start(crate::support::Backend::Postgres).await;
    let other = app.replica().await;
    let image = bytes(20, 6 * MIB + 1);
    put_range(&app.url, &image, 0..2 * MIB).await.expect(202);
    put_range(&other.url, &image, 2 * MIB..4 * MIB).await.expect(202);
    // Both at once: each MiB is stored by one of them.
    let (one, two) =
        tokio::join!(put_range(&app.url, &image, 0..image.len()), put_range(&other.url, &image, 0..image.len()));
    for answer in [one, two] {
        assert!(answer.status.is_success(), "{answer:?}");
    }
    put(&other, &image).await;
    assert!(is_there(&app, &image).await && is_there(&other, &image).await);
    let mut other = other;
    other.stop().await;
    app.finish().await;
}

async fn forebay(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay")).args(arguments).output().await.expect("the binary starts")
}

async fn doctor(database: &str) -> String {
    let output = forebay(&["doctor", "--database", database]).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

/// Uploads until it is whole, however often the service is killed.
async fn survive(database: &str) {
    let kills = endure::size(5, 10);
    // Between two kills, two MiB are acknowledged, and as many are stored by an upload that does not end.
    let image = bytes(30, (4 * kills + 1) * MIB + 5);
    let mut last = 0;
    for kill in 0..kills {
        let service = Service::start(database).await;
        let before = stored(&service.url, &image).await.as_u64().expect("a number") as usize;
        assert!(before >= last, "what was acknowledged is there");
        let url = service.url.clone();
        last = before + 2 * MIB;
        assert_eq!(put_range(&url, &image, before..last).await.expect(202)["stored"], last, "{kill}");
        let (sent, from) = (image.clone(), last);
        let upload = tokio::spawn(async move {
            let range = format!("bytes {from}-{}/{}", sent.len() - 1, sent.len());
            let request = http().put(format!("{url}/media/{}", digest(&sent))).header("content-range", range);
            let part = futures::stream::iter([Ok::<_, std::io::Error>(sent[from..from + 2 * MIB + 9].to_vec())]);
            let body = reqwest::Body::wrap_stream(part.chain(futures::stream::pending()));
            let _ = request.header("content-length", sent.len() - from).body(body).send().await;
        });
        crate::support::eventually("the upload that does not end stores a part", || async {
            stored(&service.url, &image).await.as_u64().expect("a number") as usize > last
        })
        .await;
        service.kill().await;
        upload.await.expect("an upload only fails");
    }
    let service = Service::start(database).await;
    let answer = put_to(&service.url, &digest(&image), &[], image.clone()).await;
    assert!(answer.status.is_success(), "{answer:?}");
    let (status, _, found) = get(&service.url, &digest(&image), None).await;
    assert_eq!((status.as_u16(), found == image), (200, true));
    assert!(service.stop().await.success());
    let said = doctor(database).await;
    assert!(said.contains(&format!("1 uploads, {} bytes", image.len())), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_survive_kills_on_sqlite() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    survive(&format!("sqlite:{}", folder.path().join("forebay.db").display())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_survive_kills_on_postgres() {
    survive(&crate::support::fresh_database().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_and_its_restore_have_the_uploads() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let database = format!("sqlite:{}", path("forebay.db"));
    let service = Service::start(&database).await;
    let image = bytes(40, 3 * MIB + 9);
    put_to(&service.url, &digest(&image), &[], image.clone()).await.expect(201);
    let rules = http().put(format!("{}/policies/default", service.url)).json(&json!({"group": {"size": 2}}));
    assert!(rules.send().await.expect("the service answers").status().is_success());
    let mut bundle = group("g", &[1.0, 0.0]);
    for member in bundle.as_array_mut().expect("a bundle") {
        *member = with(member.take(), naming(&[&digest(&image)]));
    }
    let sent = http().post(format!("{}/trajectories", service.url)).json(&bundle).send().await;
    assert_eq!(sent.expect("the service answers").status(), 201);
    let copied = forebay(&["backup", &path("copy.db"), "--database", &database]).await;
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    assert!(service.stop().await.success());
    assert!(Path::new(&path("copy.db-segments")).exists());

    let restored = forebay(&["restore", &path("copy.db"), "--database", &database]).await;
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    let service = Service::start(&database).await;
    let (status, _, found) = get(&service.url, &digest(&image), None).await;
    assert_eq!((status.as_u16(), found == image), (200, true));
    assert!(service.stop().await.success());

    // Pieces move with the payloads.
    let moved = forebay(&["move-payloads", "database", "--database", &database]).await;
    assert!(moved.status.success(), "{}", String::from_utf8_lossy(&moved.stderr));
    let said = doctor(&database).await;
    assert!(said.contains("6 in the database, 0 in 0 segment files"), "{said}");
    assert!(said.contains(&format!("1 uploads, {} bytes", image.len())), "{said}");
}
