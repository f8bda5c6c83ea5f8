//! The screen and its keys, drawn into memory.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use forebay_wire::{OverviewReward, OverviewStaleness, PolicyCondition, PolicyWhy, WhyCause, WhyNumbers};
use ratatui::{Terminal, backend::TestBackend};

use super::*;

fn policy(name: &str, state: PolicyCondition) -> OverviewPolicy {
    OverviewPolicy {
        policy: name.to_owned(),
        state,
        headline: format!("{name} is {}", state.as_str()),
        received_per_min: Some(1_234.4),
        tokens_per_min: None,
        ready_groups: 3,
        needed_groups: 16,
        staleness: Some(OverviewStaleness { mean: 0.75, max: 2, bound: Some(2) }),
        reward: Some(OverviewReward { trained: Some(0.5), change_20_steps: Some(0.125) }),
        lost_last_hour: None,
        last_post_at: Some("2026-11-24T02:10:00Z".to_owned()),
        last_ack_at: None,
        version: 7,
    }
}

fn policies(policies: Vec<OverviewPolicy>) -> Found {
    Found { at: "2026-11-24T02:10:31Z".parse().ok(), policies, is_whole: true }
}

fn screen(shown: Vec<OverviewPolicy>) -> Screen {
    Screen::new("http://127.0.0.1:8080".to_owned(), Duration::from_secs(3), policies(shown))
}

fn three() -> Screen {
    screen(vec![
        policy("solver", PolicyCondition::Starved),
        policy("judge", PolicyCondition::Flat),
        policy("writer", PolicyCondition::Fed),
    ])
}

/// The text that a terminal of this size shows.
fn drawn(screen: &mut Screen, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("it is memory");
    terminal.draw(|frame| draw(frame, screen, Theme { has_colours: true })).expect("it is memory");
    let buffer = terminal.backend().buffer();
    let line = |row| (0..width).map(|column| buffer[(column, row)].symbol()).collect::<String>();
    (0..height).map(|row| line(row).trim_end().to_owned() + "\n").collect()
}

fn press(screen: &mut Screen, code: KeyCode) -> Option<Wish> {
    screen.press(KeyEvent::new(code, KeyModifiers::NONE))
}

fn reasons(policy: &str, causes: usize) -> PolicyWhy {
    let cause = |number| WhyCause {
        code: "cause".to_owned(),
        filter: None,
        weight: 0.5,
        text: format!("This is the reason with the number {number}"),
        numbers: WhyNumbers::new(),
        see: None,
    };
    PolicyWhy {
        policy: policy.to_owned(),
        at: String::new(),
        state: PolicyCondition::Starved,
        headline: "It starves".to_owned(),
        causes: (0..causes).map(cause).collect(),
        ruled_out: vec![],
        unknown: vec![],
    }
}

#[test]
fn a_wide_terminal_shows_all_columns() {
    let text = drawn(&mut three(), 160, 12);
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("forebay  http://127.0.0.1:8080") && lines[0].ends_with("02:10:31 UTC"), "{text}");
    assert_eq!(lines[1], "3 policies  ▼ 1 needs you  ≈ 1 to look at");
    assert_eq!(
        lines[2].split_whitespace().collect::<Vec<_>>().join(" "),
        "POLICY STATE IN/MIN READY/NEED STALE MEAN/MAX REWARD Δ 20 STEPS LOST 1 H LAST POST VERSION WHY"
    );
    assert_eq!(
        lines[3].split_whitespace().collect::<Vec<_>>().join(" "),
        "solver ▼ starved 1,234 3/16 0.8/2 0.50 +0.12 – 31 s v7 solver is starved"
    );
    assert!(lines[8].starts_with("─ ▼ solver ─") || lines[8].starts_with(" ▼ solver ─"), "{text}");
    assert_eq!(lines[9], "solver is starved");
    assert_eq!(lines[11], "↑↓ choose  Enter why  r refresh  p pause  q quit");
}

#[test]
fn a_narrow_terminal_keeps_names_and_states() {
    let titles = |width| {
        let text = drawn(&mut three(), width, 12);
        text.lines().nth(2).expect("the titles").split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(titles(90), "POLICY STATE IN/MIN READY/NEED REWARD Δ 20 STEPS LOST 1 H LAST POST");
    assert_eq!(titles(60), "POLICY STATE IN/MIN READY/NEED REWARD LOST 1 H");
    assert_eq!(titles(30), "POLICY STATE READY/NEED");
    assert_eq!(titles(18), "POLICY STATE");
    for width in 1..=170 {
        for height in [1, 2, 3, 9, 10] {
            drawn(&mut three(), width, height);
        }
    }
}

#[test]
fn a_long_name_is_cut_and_the_numbers_stay() {
    let long = "p".repeat(128);
    let mut screen = screen(vec![policy(&long, PolicyCondition::Fed)]);
    let text = drawn(&mut screen, 60, 12);
    let row = text.lines().nth(3).expect("a row");
    assert!(row.starts_with("pppp") && row.contains("● fed"), "{text}");
}

#[test]
fn a_chosen_policy_stays_chosen_when_rows_move() {
    let mut screen = three();
    press(&mut screen, KeyCode::Down);
    assert_eq!(screen.chosen().map(|policy| policy.policy.as_str()), Some("judge"));
    screen.answer(policies(vec![policy("writer", PolicyCondition::Broken), policy("judge", PolicyCondition::Flat)]));
    assert_eq!(screen.table.selected(), Some(1));
    screen.answer(policies(vec![policy("judge", PolicyCondition::Broken), policy("writer", PolicyCondition::Flat)]));
    assert_eq!(screen.table.selected(), Some(0));
    // A policy that is gone leaves its row to another one.
    screen.answer(policies(vec![policy("writer", PolicyCondition::Flat)]));
    assert_eq!(screen.chosen().map(|policy| policy.policy.as_str()), Some("writer"));
    screen.answer(policies(vec![]));
    assert!(screen.chosen().is_none() && drawn(&mut screen, 80, 12).contains("No policies."));
    screen.answer(policies(vec![policy("writer", PolicyCondition::Flat)]));
    assert_eq!(screen.table.selected(), Some(0));
}

#[test]
fn keys_move_within_the_list() {
    let mut screen = three();
    drawn(&mut screen, 80, 12);
    let keys = [
        (KeyCode::Up, 0),
        (KeyCode::Down, 1),
        (KeyCode::Char('j'), 2),
        (KeyCode::Char('j'), 2),
        (KeyCode::Char('k'), 1),
        (KeyCode::Home, 0),
        (KeyCode::End, 2),
        (KeyCode::PageUp, 0),
        (KeyCode::PageDown, 2),
        (KeyCode::Char('x'), 2),
    ];
    for (key, row) in keys {
        assert_eq!(press(&mut screen, key), None);
        assert_eq!(screen.table.selected(), Some(row), "{key:?}");
    }
}

#[test]
fn enter_asks_why_and_escape_goes_back() {
    let mut screen = three();
    assert_eq!(press(&mut screen, KeyCode::Enter), Some(Wish::Ask));
    assert!(drawn(&mut screen, 80, 12).contains("Asking the service."));
    screen.explain("judge", Ok(Some(reasons("judge", 1))));
    assert!(drawn(&mut screen, 80, 12).contains("Asking the service."), "an answer about another policy is not shown");
    screen.explain("solver", Ok(Some(reasons("solver", 1))));
    let text = drawn(&mut screen, 80, 12);
    assert!(text.contains("▼ solver  starved") && text.contains("1. This is the reason with the number 0"), "{text}");
    screen.explain("solver", Err("no answer".to_owned()));
    assert!(drawn(&mut screen, 80, 12).contains("1. This"), "the older reasons stay");
    screen.explain("solver", Ok(None));
    assert!(drawn(&mut screen, 80, 12).contains("There is no such policy"));
    press(&mut screen, KeyCode::Esc);
    assert!(drawn(&mut screen, 80, 12).contains("READY/NEED"));
}

#[test]
fn long_reasons_are_scrolled_to_their_end_and_not_further() {
    let mut screen = three();
    press(&mut screen, KeyCode::Enter);
    screen.explain("solver", Ok(Some(reasons("solver", 20))));
    assert!(drawn(&mut screen, 50, 12).contains("more below"));
    press(&mut screen, KeyCode::End);
    let text = drawn(&mut screen, 50, 12);
    assert!(text.contains("number 19") && !text.contains("more below"), "{text}");
    press(&mut screen, KeyCode::Up);
    assert!(drawn(&mut screen, 50, 12).contains(" 1 more below"));
    press(&mut screen, KeyCode::Home);
    assert!(drawn(&mut screen, 50, 12).contains("▼ solver  starved"));
}

#[test]
fn a_reason_that_is_too_long_for_a_line_is_indented_like_its_text() {
    let mut screen = three();
    press(&mut screen, KeyCode::Enter);
    screen.explain("solver", Ok(Some(reasons("solver", 1))));
    let text = drawn(&mut screen, 40, 12);
    assert!(text.contains("\n  1. This is the reason with the number\n     0\n"), "{text}");
}

#[test]
fn a_failure_is_said_with_its_age_until_there_is_an_answer() {
    let mut screen = three();
    screen.failure = Some("nothing listens\u{1b}[2J".to_owned());
    let text = drawn(&mut screen, 80, 12);
    assert!(text.contains("No answer for 0 s: nothing listens\u{fffd}[2J") && text.contains("solver"), "{text}");
    screen.answer(policies(vec![]));
    assert!(!drawn(&mut screen, 80, 12).contains("No answer"));
}

#[test]
fn a_pause_is_said_and_its_end_asks() {
    let mut screen = three();
    assert_eq!(press(&mut screen, KeyCode::Char('p')), None);
    let text = drawn(&mut screen, 80, 12);
    assert!(text.contains("paused, the numbers are 0 s old") && text.contains("p go on"), "{text}");
    assert_eq!(press(&mut screen, KeyCode::Char('p')), Some(Wish::Ask));
    assert_eq!(press(&mut screen, KeyCode::Char('r')), Some(Wish::Ask));
}

#[test]
fn q_and_control_c_end_it() {
    let mut screen = three();
    assert_eq!(press(&mut screen, KeyCode::Char('q')), Some(Wish::Quit));
    assert_eq!(screen.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Some(Wish::Quit));
    assert_eq!(press(&mut screen, KeyCode::Char('c')), None);
}

#[test]
fn the_worst_of_many_policies_are_called_so() {
    let mut screen = three();
    screen.shown.is_whole = false;
    assert!(drawn(&mut screen, 80, 12).contains("the worst 3 policies of more"));
}

#[test]
fn every_condition_has_a_kind_as_on_the_page() {
    use draw::Kind;
    let kinds = PolicyCondition::ALL.map(Kind::of);
    let of = |kind| kinds.iter().filter(|found| **found == kind).count();
    assert_eq!((of(Kind::Bad), of(Kind::Warning), of(Kind::Good), of(Kind::Quiet)), (3, 5, 1, 1));
}
