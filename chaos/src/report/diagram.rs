//! A finding as a picture: its operations as bars, one lane per process.
//!
//! The axis is the order of the history, not the clock: what ended before something else began stands left of it, with
//! room for its label, however short it was. The times are in the text that is shown when a bar is pointed at.

use std::collections::BTreeSet;

use super::charts::duration;
use super::svg::Svg;
use crate::check::Finding;
use crate::check::bars::{Bar, End};

const LEFT: f64 = 90.0;
const LANE: f64 = 46.0;
const TOP: f64 = 40.0;
const BAR: f64 = 24.0;
/// Of one character of a label.
const CHARACTER: f64 = 7.3;
/// Longer labels are cut off; they are whole where the bar is pointed at.
const MAX_LABEL: usize = 64;
/// Room for the shortest stretch between two events.
const MIN_STRETCH: f64 = 26.0;
/// Most bars of one picture.
pub(super) const MAX_BARS: usize = 60;

/// The picture of a finding; none if it has no operations.
pub(super) fn diagram(finding: &Finding) -> Option<String> {
    let bars = &finding.bars[..finding.bars.len().min(MAX_BARS)];
    if bars.is_empty() {
        return None;
    }
    let lanes: Vec<u64> = bars.iter().map(|bar| bar.process).collect::<BTreeSet<_>>().into_iter().collect();
    let places: Vec<u64> = bars
        .iter()
        .flat_map(|bar| [Some(bar.invoked), bar.ended])
        .flatten()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let xs = positions(bars, &places);
    let right = xs.last().copied().unwrap_or(LEFT) + MIN_STRETCH * 2.0;
    let height = TOP + LANE * lanes.len() as f64 + 10.0;
    let mut svg = Svg::new(right + 10.0, height);
    for (lane, process) in lanes.iter().enumerate() {
        let y = TOP + LANE * lane as f64 + BAR / 2.0;
        svg.line("grid", [LEFT, y, right, y]);
        svg.text("small", "end", (LEFT - 8.0, y + 4.0), format!("process {process}"));
    }
    let spans: Vec<(f64, f64, f64)> = bars
        .iter()
        .map(|bar| {
            let x = |place: u64| xs[places.partition_point(|other| *other < place)];
            let lane = lanes.partition_point(|process| *process < bar.process);
            (x(bar.invoked), bar.ended.map_or(right, x), TOP + LANE * lane as f64)
        })
        .collect();
    for (bar, (from, to, y)) in bars.iter().zip(&spans) {
        let class = match bar.outcome {
            End::Ok => "bar",
            End::Fail => "bar failed-bar",
            End::Unknown => "bar unknown-bar",
        };
        svg.rect(class, [*from, *y, to - from, BAR], &described(bar));
        svg.text("label", "start", (from + 6.0, y + 16.0), shortened(&bar.label));
    }
    for edge in finding.edges.iter().filter(|edge| edge.from < bars.len() && edge.to < bars.len()) {
        let ((from_left, from_right, from_y), (to_left, to_right, to_y)) = (spans[edge.from], spans[edge.to]);
        // From the upper or the lower side, whichever faces the other bar.
        let below = to_y > from_y;
        let start = ((from_left + from_right) / 2.0, if below { from_y + BAR } else { from_y });
        let end = ((to_left + to_right) / 2.0, if below || to_y == from_y { to_y } else { to_y + BAR });
        svg.arrow(&format!("edge edge-{}", edge.kind), start, end, &edge.because);
        let middle = ((start.0 + end.0) / 2.0 + 4.0, (start.1 + end.1) / 2.0 - 2.0);
        svg.text("small", "start", middle, &edge.kind);
    }
    Some(svg.finish(&finding.explanation[0]))
}

/// Where each place of the history is drawn: far enough from the one before for the labels of what ends there.
fn positions(bars: &[Bar], places: &[u64]) -> Vec<f64> {
    let mut xs: Vec<f64> = Vec::with_capacity(places.len());
    for (at, place) in places.iter().enumerate() {
        let after_last = xs.last().map_or(LEFT + 10.0, |x| x + MIN_STRETCH);
        let ending = bars.iter().filter(|bar| bar.ended == Some(*place));
        let for_labels = ending.map(|bar| {
            let from = xs[places[..at].partition_point(|other| *other < bar.invoked)];
            from + 12.0 + CHARACTER * shortened(&bar.label).chars().count() as f64
        });
        xs.push(for_labels.fold(after_last, f64::max));
    }
    // Bars without an end go on to the right edge, which must leave room for their labels as well.
    let open = bars.iter().filter(|bar| bar.ended.is_none()).map(|bar| {
        let from = xs[places.partition_point(|other| *other < bar.invoked)];
        from + CHARACTER * shortened(&bar.label).chars().count() as f64 - MIN_STRETCH
    });
    if let (Some(needed), Some(last)) = (open.reduce(f64::max), xs.last_mut()) {
        *last = last.max(needed);
    }
    xs
}

fn shortened(label: &str) -> String {
    match label.char_indices().nth(MAX_LABEL) {
        Some((end, _)) => format!("{}...", &label[..end]),
        None => label.to_owned(),
    }
}

fn described(bar: &Bar) -> String {
    let outcome = match bar.outcome {
        End::Ok => "ok",
        End::Fail => "failed",
        End::Unknown => "outcome unknown",
    };
    let mut text = format!("{}\n{outcome}; began at {}", bar.label, duration(bar.invoked_ns as f64));
    let mut add = |what: String| {
        text.push_str("; ");
        text.push_str(&what);
    };
    if let Some(ended_ns) = bar.ended_ns {
        add(format!("ended at {}", duration(ended_ns as f64)));
    }
    bar.peer.into_iter().for_each(|peer| add(format!("peer {peer}")));
    bar.revision.into_iter().for_each(|revision| add(format!("revision {revision}")));
    bar.error.iter().for_each(|error| add(error.clone()));
    text
}
