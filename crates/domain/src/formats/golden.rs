//! Digests, seals and payloads as earlier versions stored them. If one of these tests fails, the service would treat
//! the contents of existing databases as conflicting or damaged.

use std::collections::BTreeMap;

use forebay_wire::{Sampling, Segment, Status, Trajectory as Sent, Turn, TurnSpan, VersionSpan};
use serde_json::value::RawValue;

use super::{
    logprobs,
    payload::{CODEC, Payload},
    seal::{self, RolloutSeal},
};
use crate::{
    ids::{ExecutionId, IdKey, RolloutPk, Version},
    staleness::TrainedSpan,
    states::Verdict,
    surrogates::LoneSurrogates,
    trajectory::{Trajectory, TrajectoryLimits},
};

const LIMITS: TrajectoryLimits = TrajectoryLimits {
    tokens_max: 100,
    segments_max: 8,
    metadata_bytes_max: 1_000,
    lone_surrogates: LoneSurrogates::Replace,
};

fn raw(json: &str) -> Box<RawValue> {
    RawValue::from_string(json.to_owned()).expect("it is JSON")
}

/// Every field has a value, and no two numbers are equal.
fn full() -> Sent {
    let first = Segment {
        kind: Some("turn".to_owned()),
        tokens: vec![1, 2, 70_000, 300],
        loss_mask: vec![1, 0, 1],
        logprobs: Some(vec![-0.5, -0.25, -0.125]),
        teacher_logprobs: Some(vec![-1.5, -2.5, -3.5]),
        values: Some(vec![0.75, 1.25, 1.75]),
        versions: Some(vec![VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)]),
        ..Segment::default()
    };
    let second = Segment { tokens: vec![8, 9], loss_mask: vec![1], ..Segment::default() };
    Sent {
        policy: Some("math".to_owned()),
        rollout_id: Some("rollout".to_owned()),
        group_id: Some("group".to_owned()),
        environment: Some("swe".to_owned()),
        policy_version: Some(4),
        reward: Some(0.375),
        reward_components: BTreeMap::from([("tests".to_owned(), 2.0), ("cost".to_owned(), -3.0)]),
        sampling: Sampling { temperature: 0.625, top_p: 0.875, top_k: 40 },
        segments: vec![first, second],
        messages: Some(raw(r#"[{"role": "user", "content": "h\u00e9"}]"#)),
        metadata: Some(raw(r#"{"a": [1, 2.5, null, true, false], "b": 123456789012345678901234567890, "c": {}}"#)),
        ..Sent::default()
    }
}

fn parse(sent: Sent) -> Trajectory {
    Trajectory::parse(sent, &LIMITS).expect("it is valid")
}

fn hex(bytes: &[u8]) -> String {
    let digits: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.concat()
}

#[test]
fn contents_have_the_digests_that_earlier_versions_stored() {
    let of = |status| hex(parse(Sent { status, ..full() }).content.as_bytes());
    let found = [Status::Completed, Status::Truncated, Status::Aborted, Status::Failed].map(of);
    assert_eq!(
        found,
        [
            "42d5935258cb2e8cdf7925751253b0ea16ba2d0244ee4f486b7aa096d86e44bf",
            "d7d3aaedc52f551edfdb4ec5ef3e313cceb501c4f7a5d483c13ac21185ef9e94",
            "c4aec28050da7e089dbbad5e13aff8286190f7f52b0cf859166ee52fb111b355",
            "36a65c595274126bccfef9c0f780cb82b535960b1f96f29e0e2b20b0c458dd4b"
        ]
    );
    let least = Sent { rollout_id: Some("rollout".to_owned()), ..Sent::default() };
    assert_eq!(
        hex(parse(least).content.as_bytes()),
        "277a9e77d7653424d3bb8032ea1e8cb01c9bcb829dac30b01ff451506ff32b94"
    );
}

#[test]
fn executions_are_stored_and_hashed_as_earlier_versions_did() {
    let uuid = "01890a5d-ac96-774b-bcce-b302099a8057";
    let found = ["7f3c", uuid].map(|id| {
        let content = parse(Sent { execution_id: Some(id.to_owned()), ..full() }).content;
        (hex(&ExecutionId::parse(id).expect("it is an id").stored()), hex(content.as_bytes()))
    });
    let expected = [
        ("37663363", "07e60d695913882cac08d0c68a62bff01a27023c8e1e1e719aa4be38fdd07672"),
        ("0001890a5dac96774bbcceb302099a8057", "30912420a5872e007125143b9cd21da89efac6d75b980521d2c3ab33b88c89ad"),
    ];
    assert_eq!(found, expected.map(|(id, content)| (id.to_owned(), content.to_owned())));
}

/// Two turns, the first with a value in every field.
fn turns() -> Vec<Turn> {
    let first = Turn {
        id: Some("c1".to_owned()),
        after: Some("c2".to_owned()),
        prompt_tokens: vec![1, 70_000],
        tokens: vec![11, 12, 9],
        logprobs: Some(vec![-0.5, -0.25, -0.125]),
        versions: Some(vec![VersionSpan(5, 0, 1), VersionSpan(6, 1, 2)]),
        finish_reason: Some("stop".to_owned()),
        stopped_on_token: true,
        agent: Some("main".to_owned()),
        delivered: false,
        retry_count: 0,
        reward: None,
        state_key: None,
    };
    let second = Turn {
        id: Some("c2".to_owned()),
        prompt_tokens: vec![8],
        tokens: vec![7],
        logprobs: Some(vec![-1.0]),
        versions: Some(vec![VersionSpan(5, 0, 1)]),
        ..Turn::default()
    };
    vec![first, second]
}

#[test]
fn advantages_and_turns_are_hashed_as_earlier_versions_did() {
    let of = |change: &dyn Fn(&mut Sent)| {
        let mut sent = full();
        change(&mut sent);
        hex(parse(sent).content.as_bytes())
    };
    let advantages = of(&|sent| sent.segments[1].advantages = Some(vec![0.5]));
    let span = |state_key: Option<&str>| TurnSpan {
        start: 0,
        length: 1,
        reward: Some(0.5),
        state_key: state_key.map(str::to_owned),
    };
    let spans = of(&|sent| sent.segments[1].turns = Some(vec![span(Some("state"))]));
    let without_state = of(&|sent| sent.segments[1].turns = Some(vec![span(None)]));
    let calls = of(&|sent| {
        sent.segments.clear();
        sent.turns = turns();
        (sent.turns[0].reward, sent.turns[0].state_key) = (Some(0.5), Some("state".to_owned()));
    });
    let expected = [
        "a14a48252b71b9a55f66c8a58443bf36b2b0cd05d8c27ed91eb56714aeac76e9",
        "595d2189ddc19edae54dc2ef23136107f8540d007a62ad6fd2b69649ed15f0c5",
        "d68846ac76048569e428e24f738554afaa1e513cfeaef9ba6e4cab9540340b13",
        "f412d924f0728840950f4ccf5e3a4ca38f712732e18961bf212d35e600add74e",
    ];
    assert_eq!([advantages, spans, without_state, calls], expected);
}

#[test]
fn turns_have_the_digests_that_earlier_versions_stored() {
    let of = |turns| hex(parse(Sent { segments: Vec::new(), turns, ..full() }).content.as_bytes());
    let expected = "5a7c007b80fce405558fded24813410466dfc65463b92b3fb28df2dc2ff85fe6";
    assert_eq!(of(turns()), expected);
    // The order of the list is not part of the content.
    assert_eq!(of(turns().into_iter().rev().collect()), expected);
    let edits: [fn(&mut Turn); 10] = [
        |turn| turn.id = None,
        |turn| turn.after = None,
        |turn| turn.prompt_tokens = vec![1],
        |turn| turn.tokens[0] = 10,
        |turn| turn.logprobs = Some(vec![-0.5, -0.25, -0.5]),
        |turn| turn.versions = Some(vec![VersionSpan(5, 0, 2), VersionSpan(6, 2, 1)]),
        |turn| turn.finish_reason = Some("length".to_owned()),
        |turn| turn.stopped_on_token = false,
        |turn| turn.agent = None,
        |turn| turn.delivered = true,
    ];
    for (field, edit) in edits.into_iter().enumerate() {
        let mut changed = turns();
        edit(&mut changed[0]);
        assert_ne!(of(changed), expected, "field {field}");
    }
    // The segments that turns are assembled into are other content than the turns.
    let assembled = parse(Sent { segments: Vec::new(), turns: turns(), ..full() });
    let posted = Sent { segments: assembled.segments, ..full() };
    assert_ne!(hex(parse(posted).content.as_bytes()), expected);
}

#[test]
fn rollouts_have_the_seals_that_earlier_versions_stored() {
    let spans = [(0, 5, 1), (0, 6, 2)].map(TrainedSpan::from);
    let full = RolloutSeal {
        rollout_id: "rollout",
        group_id: "group",
        verdict: Verdict::Kept,
        reward: Some(0.375),
        policy_version: Version(4),
        trained_spans: Some(&spans),
        payload: &[7; 32],
    };
    let of = |verdict| hex(&RolloutSeal { verdict, ..full }.checksum());
    let found = [Verdict::Kept, Verdict::Masked, Verdict::Dropped, Verdict::Late].map(of);
    assert_eq!(
        found,
        [
            "388dcb9ceac92f709495728cd8c5e9df",
            "0005230024d90c34827066a4da3193dc",
            "e61f97ebb6b743d507497d452e7a66ec",
            "95f9908586f8300786b2cb7c21647531"
        ]
    );
    assert_eq!(
        hex(&RolloutSeal { reward: None, trained_spans: None, ..full }.checksum()),
        "ca25d9d61ad685b9b7627c034719833c"
    );
    assert_eq!(
        hex(&seal::of_group([(RolloutPk(1), 0.5, None), (RolloutPk(2), -0.5, None)])),
        "51ea91d119e486697dd1c012aef30588"
    );
}

#[test]
fn ids_have_the_keys_that_earlier_versions_stored() {
    let long = "rollout".repeat(20);
    assert_eq!(
        ["task7-1", long.as_str()].map(|id| IdKey::of(id).to_hex()),
        [
            "7461736b372d31",
            "726f6c6c6f7574726f6c6c6f7574726f6c6c6f7574726f6c6c6f7574726f6c6c6f7574726f6c6c6f68ea823e672c3a6f8a89a17c1d9369be6f7574726f6c6c6f7574726f6c6c6f7574726f6c6c6f7574"
        ]
    );
}

#[test]
fn payloads_are_written_as_earlier_versions_wrote_them() {
    let payload = Payload::pack(&parse(full()));
    assert_eq!((payload.codec, CODEC, payload.unpacked_bytes), (3, 3, 627));
    // Three columns of floats of the first segment, each with a byte that says that it is plain.
    assert_eq!(
        hex(&payload.body),
        format!("3302000015000000{HEADER}{FLOATS}0100000200007011012c0100050000000800090001")
    );
}

#[test]
fn payloads_of_the_first_form_are_read() {
    let body = format!("3302000012000000{HEADER}0100000200007011012c0100050800090001{FLOATS}");
    let bytes = body.as_bytes().chunks(2).map(|digits| {
        let digits = str::from_utf8(digits).expect("they are digits");
        u8::from_str_radix(digits, 16).expect("they are digits")
    });
    let payload = Payload { codec: 1, ..Payload::claimed(bytes.collect()) };
    assert_eq!(payload.unpack().expect("it is not damaged").segments, full().segments);
}

#[test]
fn log_probabilities_are_read_as_earlier_versions_wrote_them() {
    // Numbers of all lengths, at both ends of intervals and binades.
    let narrow = [&[1, 20, 0, 0, 0][..], &[0b11_10_01_00, 0b11_11_11_11]].concat();
    let bytes = [&[1][..], &[0xFF, 0xFF], &[0, 0, 1], &[0xFF, 0xFF, 0x7F], &[0, 0, 0x80], &[0xFF, 0xFF, 0xFE]];
    let bytes = [&bytes.concat()[..], &[0, 0, 0xFF, 0xC0, 0xFF]].concat();
    for (law, expected) in [
        (1, "00000000 b3ffffff bbff0055 bbff0153 bf317217 bf317218 bfb0f1d7 ffc00000"),
        (2, "00000000 b3800000 bb803faa bb80402b bf317216 bf317218 bfb07316 ffc00000"),
    ] {
        let narrow = [&[law], &narrow[1..]].concat();
        let mut column = Vec::new();
        logprobs::take_column(&mut &narrow[..], &mut &bytes[..], &mut column, 8).expect("it is not damaged");
        let bits: Vec<String> = column.iter().map(|value| format!("{:08x}", value.to_bits())).collect();
        assert_eq!(bits.join(" "), expected);
    }
}

/// The header of [`full`].
const HEADER: &str = "\
    7b22656e7669726f6e6d656e74223a22737765222c22737461747573223a22636f6d706c65746564222c2273616d706c696e\
    67223a7b2274656d7065726174757265223a302e3632352c22746f705f70223a302e3837352c22746f705f6b223a34307d2c\
    227265776172645f636f6d706f6e656e7473223a7b22636f7374223a2d332e302c227465737473223a322e307d2c226d6573\
    7361676573223a5b7b22726f6c65223a202275736572222c2022636f6e74656e74223a2022685c7530306539227d5d2c226d\
    65746164617461223a7b2261223a205b312c20322e352c206e756c6c2c20747275652c2066616c73655d2c202262223a2031\
    32333435363738393031323334353637383930313233343536373839302c202263223a207b7d7d2c227365676d656e747322\
    3a5b7b226b696e64223a227475726e222c22746f6b656e73223a342c22726573706f6e7365223a332c226c6f6770726f6273\
    223a747275652c22746561636865725f6c6f6770726f6273223a747275652c2276616c756573223a747275652c2276657273\
    696f6e73223a5b5b352c302c315d2c5b362c312c325d5d2c2269645f6279746573223a337d2c7b226b696e64223a6e756c6c\
    2c22746f6b656e73223a322c22726573706f6e7365223a312c226c6f6770726f6273223a66616c73652c2274656163686572\
    5f6c6f6770726f6273223a66616c73652c2276616c756573223a66616c73652c2276657273696f6e73223a6e756c6c2c2269\
    645f6279746573223a327d5d7d";

/// The floats of [`full`].
const FLOATS: &str = "000000bf000080be000000be0000c0bf000020c0000060c00000403f0000a03f0000e03f";
