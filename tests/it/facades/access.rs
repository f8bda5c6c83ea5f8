//! What all facades share: keys in paths, roles, policies, and how they listen.

use forebay_wire::Role;
use reqwest::Method;
use serde_json::json;

use super::Facade;
use crate::support::{on_both_stores, process::Service, text};

/// An item of one message.
fn item(instance: &str, uid: &str) -> serde_json::Value {
    json!({"uid": uid, "instance_id": instance, "messages": [{"role": "assistant", "content": "x"}], "reward": 1,
        "extra_info": {}})
}

on_both_stores! {
    async fn a_key_is_taken_from_the_path_or_the_header_and_its_role_and_policies_count(app: TestApp) {
        app.rules("default", json!({"require": []})).await;
        app.reconfigure("[facades]\nslime = \"127.0.0.1:0\"").await;
        let open = Facade::of(app, "slime");
        open.post("/buffer/write", &item("a", "1")).await.expect(200);
        let (agent, trainer) = (app.key(Role::Produce, &["*"]).await, app.key(Role::Train, &["*"]).await);
        let stranger = app.key(Role::Admin, &["other"]).await;
        let refused = open.post("/buffer/write", &item("a", "2")).await.expect(401);
        assert!(text(&refused["detail"]).contains("key"), "{refused}");
        for path in ["/", "/health"] {
            open.call(Method::GET, path, &[], Vec::new()).await.expect(200);
        }
        let (writer, reader) = (open.at(&format!("/k/{agent}")), open.at(&format!("/k/{trainer}/")));
        writer.post("/buffer/write", &item("b", "2")).await.expect(200);
        writer.post("/get_rollout_data", &json!({})).await.expect(403);
        reader.post("/buffer/write", &item("b", "3")).await.expect(403);
        writer.post("/start_rollout", &json!({})).await.expect(403);
        let read = reader.post("/get_rollout_data", &json!({})).await.expect(200);
        assert_eq!(read["data"]["data"].as_array().map(Vec::len), Some(2), "{read}");
        // What its key does not include does not exist.
        open.at(&format!("/k/{stranger}")).post("/get_rollout_data", &json!({})).await.expect(404);
        let bearer = format!("Bearer {agent}");
        let headers = [("authorization", bearer.as_str()), ("content-type", "application/json")];
        let body = item("c", "4").to_string().into_bytes();
        open.call(Method::POST, "/buffer/write", &headers, body.clone()).await.expect(200);
        open.at("/k/fb_wrong").call(Method::POST, "/buffer/write", &headers, body).await.expect(401);
        let metrics = app.metrics_as_admin().await;
        assert!(metrics.contains(r#"route="slime:/buffer/write",status="200""#), "{metrics}");
        assert!(!metrics.contains(&agent) && !metrics.contains("fb_wrong"));
    }

    async fn errors_are_those_of_fastapi_and_forms_and_other_hosts_are_refused(app: TestApp) {
        app.reconfigure("[facades]\nslime = \"127.0.0.1:0\"").await;
        let facade = Facade::of(app, "slime");
        let unknown = facade.call(Method::GET, "/nothing", &[], Vec::new()).await.expect(404);
        assert_eq!(unknown, json!({"detail": "Not Found"}));
        facade.call(Method::GET, "/buffer/write", &[], Vec::new()).await.expect(405);
        let form = [("content-type", "text/plain")];
        facade.call(Method::POST, "/get_rollout_data", &form, b"{}".to_vec()).await.expect(415);
        let page = [("origin", "http://evil.example"), ("content-type", "application/json")];
        facade.call(Method::POST, "/get_rollout_data", &page, b"{}".to_vec()).await.expect(403);
        facade.call(Method::GET, "/health", &[("host", "evil.example")], Vec::new()).await.expect(421);
        let malformed = facade.call(Method::POST, "/get_rollout_data", &[], b"{".to_vec()).await.expect(400);
        assert!(malformed["detail"].is_string(), "{malformed}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_port_files_of_facades_are_beside_that_of_the_service_and_the_log_has_no_key() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (config, file) = (folder.path().join("forebay.toml"), folder.path().join("port"));
    std::fs::write(&config, "[facades]\nslime = \"127.0.0.1:0\"\n").expect("the file is written");
    let path = |path: &std::path::Path| path.to_str().expect("the path is text").to_owned();
    let arguments = ["--log", "json", "--config", &path(&config), "--port-file", &path(&file)];
    let service = Service::start_with("sqlite::memory:", &arguments, &[("RUST_LOG", "trace")]).await;
    let beside = folder.path().join("port.slime");
    let address = std::fs::read_to_string(&beside).expect("it was written before the service said that it serves");
    assert!(service.log().contains(&format!("slime={}", address.trim())));
    let url = format!("http://{}/k/fb_secret_secret/buffer/write", address.trim());
    let answer = crate::support::http().post(url).json(&item("a", "1")).send().await.expect("the facade answers");
    assert_eq!(answer.status(), 422, "text alone needs a policy that requires no tokens");
    // The line is written behind the answer.
    let is_logged = || async { service.log().contains("slime:/buffer/write") };
    crate::support::eventually("the line of the request", is_logged).await;
    assert!(!service.log().contains("fb_secret"));
    assert!(service.stop().await.success());
    assert!(!beside.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_facade_that_others_can_reach_needs_keys() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[facades]\nslime = \"0.0.0.0:0\"\n").expect("the file is written");
    let config = config.to_str().expect("the path is text");
    let ended = Service::try_start("sqlite::memory:", &[("FOREBAY_CONFIG", config)]).await;
    assert!(ended.is_err_and(|status| !status.success()), "no keys exist");
    let open = [("FOREBAY_CONFIG", config), ("FOREBAY_INSECURE", "true")];
    let service = Service::try_start("sqlite::memory:", &open).await.expect("it was told to");
    assert!(service.stop().await.success());
}
