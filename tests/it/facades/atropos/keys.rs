//! Which key may call what, and that the address can have the key.

use forebay_wire::Role;
use reqwest::Method;
use serde_json::json;

use super::support::{Server, scored};
use crate::support::on_both_stores;

on_both_stores! {
    async fn every_call_needs_a_key_of_its_role(app: TestApp) {
        let server = Server::of(app).await;
        let admin = server.app().key(Role::Admin, &["*"]).await;
        let produce = server.app().key(Role::Produce, &["default"]).await;
        let train = server.app().key(Role::Train, &["default"]).await;
        let read = server.app().key(Role::Read, &["default"]).await;
        let other = server.app().key(Role::Produce, &["other"]).await;
        let url = server.url();
        let status = async |key: &str, method: Method, path: &str| {
            let request = server.app().http.request(method, format!("{url}{path}")).bearer_auth(key);
            let answer = request.json(&json!({"env_id": 0})).send().await.expect("answered");
            answer.status().as_u16()
        };
        let may = [
            (Method::GET, "/info", [200, 200, 200]),
            (Method::GET, "/wandb_info", [200, 200, 200]),
            (Method::GET, "/status", [200, 200, 200]),
            (Method::GET, "/status-env", [422, 422, 422]),
            (Method::POST, "/scored_data", [422, 403, 403]),
            (Method::POST, "/scored_data_list", [422, 403, 403]),
            (Method::POST, "/register-env", [422, 403, 403]),
            (Method::POST, "/disconnect-env", [200, 403, 403]),
            (Method::POST, "/register", [403, 422, 403]),
            (Method::GET, "/batch", [403, 200, 403]),
            (Method::GET, "/latest_example", [403, 200, 200]),
            (Method::GET, "/reset_data", [403, 403, 403]),
        ];
        for (method, path, expected) in may {
            for (key, expected) in [&produce, &train, &read].into_iter().zip(expected) {
                assert_eq!(status(key, method.clone(), path).await, expected, "{method} {path}");
            }
            assert_eq!(status("fb_none", method.clone(), path).await, 401, "{method} {path}");
        }
        assert_eq!(status(&admin, Method::GET, "/reset_data").await, 200);
        assert_eq!(status(&other, Method::GET, "/info").await, 404, "a key of another policy");
        let in_path = format!("{url}/k/{produce}/scored_data");
        let answer = server.app().http.post(in_path).json(&scored(0, 2)).send().await.expect("answered");
        assert_eq!(answer.status(), 200);
    }
}
