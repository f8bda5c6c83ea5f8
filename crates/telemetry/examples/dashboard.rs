//! Prints the Grafana dashboard (`make generate`).

#![expect(clippy::print_stdout, reason = "it prints the dashboard")]

fn main() {
    print!("{}", forebay_telemetry::dashboard::json());
}
