//! Facades on listeners with TLS, with clients that only know an address.

use reqwest::RequestBuilder;
use serde_json::{Value, json};

use super::{Authority, config, write};
use crate::support::{Backend, TestApp};
use forebay_client::ClientOptions;

/// Both facades, each with a policy of its own.
const FACADES: &str = "[facades]
slime = { listen = \"127.0.0.1:0\", policy = \"items\" }
atropos = { listen = \"127.0.0.1:0\", policy = \"scored\" }
[[policy]]
name = \"items\"
require = []
group = { size = 2 }
[[policy]]
name = \"scored\"
";

/// A client that believes an authority, and presents a certificate if it has one.
fn client(authority: &Authority, identity: Option<(String, String)>) -> reqwest::Client {
    let options = ClientOptions {
        ca_pem: Some(authority.pem().into_bytes()),
        identity_pem: identity.map(|(certificate, key)| (certificate + &key).into_bytes()),
        ..ClientOptions::default()
    };
    let tls = options.tls(true).expect("the certificates are valid");
    reqwest::Client::builder().tls_backend_preconfigured(tls).build().expect("the options are valid")
}

async fn answer(request: RequestBuilder) -> Value {
    let answer = request.send().await.expect("the facade answers");
    let status = answer.status();
    let text = answer.text().await.expect("the answer arrives whole");
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap_or(Value::Null)
}

/// A group of slime is written and read.
async fn slime_serves(http: &reqwest::Client, url: &str) {
    for uid in ["1", "2"] {
        let item = json!({"uid": uid, "instance_id": "a", "messages": [], "reward": 1, "extra_info": {}});
        answer(http.post(format!("{url}/buffer/write")).json(&item)).await;
    }
    let read = answer(http.post(format!("{url}/get_rollout_data")).json(&json!({}))).await;
    assert_eq!(read["data"]["meta_info"]["finished_groups"], json!(["a"]), "{read}");
}

/// A group of Atropos is posted and read.
async fn atropos_serves(http: &reqwest::Client, url: &str) {
    let trainer = json!({
        "wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 512, "checkpoint_dir": "",
        "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 1000,
    });
    answer(http.post(format!("{url}/register")).json(&trainer)).await;
    let scored = json!({"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [1.0, 0.0]});
    answer(http.post(format!("{url}/scored_data")).json(&scored)).await;
    let batch = answer(http.get(format!("{url}/batch"))).await;
    assert_eq!(batch["batch"][0]["tokens"], scored["tokens"], "{batch}");
}

/// Whether a client gets an answer to a call that needs no key.
async fn is_answered(http: &reqwest::Client, url: &str) -> bool {
    http.get(format!("{url}/health")).send().await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn facades_are_encrypted_and_authenticate_the_service() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let authority = Authority::new();
    write(folder.path(), &authority);
    let config = format!("{}{FACADES}", config(folder.path(), false));
    let app = TestApp::start_with(Backend::Sqlite, &config).await;
    let http = client(&authority, None);
    slime_serves(&http, &app.facades["slime"]).await;
    atropos_serves(&http, &app.facades["atropos"]).await;
    let other = client(&Authority::new(), None);
    for url in app.facades.values() {
        assert!(!is_answered(&other, url).await, "another authority: {url}");
        let plain = url.replace("https://", "http://");
        assert!(plain.starts_with("http://") && !is_answered(&http, &plain).await, "unencrypted: {plain}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_client_ca_facades_serve_only_clients_with_its_certificates() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let (servers, clients) = (Authority::new(), Authority::new());
    write(folder.path(), &servers);
    std::fs::write(folder.path().join("clients.pem"), clients.pem()).expect("the file is written");
    let config = format!("{}{FACADES}", config(folder.path(), true));
    let app = TestApp::start_with(Backend::Sqlite, &config).await;
    let http = client(&servers, Some(clients.sign("trainer")));
    slime_serves(&http, &app.facades["slime"]).await;
    atropos_serves(&http, &app.facades["atropos"]).await;
    for url in app.facades.values() {
        assert!(!is_answered(&client(&servers, None), url).await, "no certificate: {url}");
        let another = client(&servers, Some(Authority::new().sign("trainer")));
        assert!(!is_answered(&another, url).await, "another's: {url}");
    }
    app.finish().await;
}
