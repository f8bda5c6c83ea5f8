//! Pictures of the page for the documents. With `FOREBAY_PICTURES=FOLDER` (`./scripts/endure console::pictures`) they
//! are written.

use std::path::Path;

use serde_json::json;

use super::{Page, open, origin};
use crate::support::{Backend, TestApp, endure, group, with};

/// The most bytes of a picture: documents must load on slow networks.
const PICTURE_BYTES_MAX: usize = 150 << 10;

/// Takes a picture of what a page shows, and writes it if a folder is named.
pub(crate) async fn picture(page: &Page, name: &str) {
    let bytes = page.screenshot().await;
    assert!(bytes.starts_with(b"\x89PNG"), "it is a PNG");
    assert!(bytes.len() <= PICTURE_BYTES_MAX, "{name}.png has {} bytes", bytes.len());
    if let Ok(folder) = std::env::var("FOREBAY_PICTURES") {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        std::fs::create_dir_all(&folder).expect("the folder can be made");
        std::fs::write(folder.join(format!("{name}.png")), bytes).expect("the picture can be written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pictures_of_the_first_two_screens_are_small() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let rules = json!({"group": {"size": 4}, "batch": {"groups": 4}, "staleness": {"max": 4}});
    app.rules("math.solver", rules).await;
    for step in 1..=30_i64 {
        for name in 0..4 {
            let posted = group(&format!("aime-{step}-{name}"), &[1.0, 0.0, 1.0, 0.0]);
            let posted = posted.as_array().expect("a bundle").iter();
            app.accept(posted.map(|rollout| with(rollout.clone(), json!({"policy": "math.solver"}))).collect()).await;
        }
        let batch = app.lease_with(json!({"policy": "math.solver", "consumer": "trainer-0"})).await;
        app.pass_s(45.0).await;
        app.ack(&batch, step).await.expect(200);
        app.pass_s(15.0).await;
    }
    let page = open(&app, "").await;
    page.size(1200, 320).await;
    page.wait_for("document.querySelectorAll('[data-row]').length === 2").await;
    picture(&page, "overview").await;
    page.size(1200, 900).await;
    page.click("text=math.solver").await;
    page.wait_for("document.querySelector('.strip') !== null").await;
    picture(&page, "policy").await;
    page.assert_clean(origin(&app));
    app.finish().await;
}
