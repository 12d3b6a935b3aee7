//! The run over time: throughput, latency, who led, how far each peer lagged; all on one axis, under bands of faults.

use std::collections::BTreeSet;

use super::sample::Sample;
use super::series::{Piece, Series};
use super::svg::Svg;
use crate::check::availability::{Window, windows};
use crate::history::History;

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 14.0;
const HEIGHT: f64 = 150.0;
const LANE: f64 = 18.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 24.0;
/// Colours that the page's style has for peers.
const PEER_COLOURS: u64 = 9;

/// The axis that all charts share.
pub(super) struct Timeline<'a> {
    series: Series,
    samples: &'a [Sample],
    faults: Vec<(String, Window)>,
    length_ns: f64,
}

impl<'a> Timeline<'a> {
    pub fn of(history: &History, samples: &'a [Sample]) -> Self {
        let series = Series::of(history);
        let last_sample = samples.last().map_or(0, |sample| sample.time_ns);
        let length_ns = series.length_ns().max(last_sample).max(1) as f64;
        Timeline { series, samples, faults: windows(history), length_ns }
    }

    fn x(&self, time_ns: u64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * time_ns as f64 / self.length_ns
    }

    fn middle(&self, piece: usize) -> f64 {
        self.x(piece as u64 * self.series.piece_ns + self.series.piece_ns / 2)
    }

    /// Bands where faults were in force, from top to bottom of a chart, and the marks of time below it.
    fn frame(&self, svg: &mut Svg, height: f64) {
        for (name, window) in &self.faults {
            let (from, to) = (self.x(window.from_ns), self.x(window.to_ns));
            svg.rect("band", [from, TOP, to - from, height], &described(name, *window));
        }
        let bottom = TOP + height;
        svg.line("axis", [LEFT, bottom, WIDTH - RIGHT, bottom]);
        let step = tick(self.length_ns / 1e9, 10.0);
        for n in 0..=20 {
            let seconds = f64::from(n) * step;
            if seconds * 1e9 > self.length_ns {
                break;
            }
            let x = self.x((seconds * 1e9) as u64);
            svg.line("tick", [x, bottom, x, bottom + 4.0]);
            svg.text("small", "middle", (x, bottom + 16.0), format!("{} s", rounded(seconds)));
        }
    }

    /// Which fault was in force when: one lane for each.
    pub fn faults(&self) -> Option<String> {
        let names: BTreeSet<&str> = self.faults.iter().map(|(name, _)| name.as_str()).collect();
        if names.is_empty() {
            return None;
        }
        let height = LANE * names.len() as f64;
        let mut svg = Svg::new(WIDTH, TOP + height + BOTTOM);
        self.frame(&mut svg, height);
        for (lane, name) in names.iter().enumerate() {
            let y = TOP + LANE * lane as f64;
            svg.text("small", "end", (LEFT - 6.0, y + 13.0), name);
            for (_, window) in self.faults.iter().filter(|(other, _)| other == name) {
                let (from, to) = (self.x(window.from_ns), self.x(window.to_ns));
                svg.rect("fault", [from, y + 2.0, to - from, LANE - 4.0], &described(name, *window));
            }
        }
        Some(svg.finish("faults in force over time"))
    }

    /// Operations per second, by how they ended.
    pub fn throughput(&self) -> String {
        type Count = fn(&Piece) -> u64;
        let rate = |count: Count| self.series.pieces.iter().map(move |piece| self.series.per_second(count(piece)));
        let kinds: [(&str, Count); 4] = [
            ("ok", |piece| piece.ok),
            ("refused", |piece| piece.refused),
            ("failed", |piece| piece.failed),
            ("unknown", |piece| piece.unknown),
        ];
        let highest = kinds.iter().flat_map(|(_, count)| rate(*count)).fold(1.0, f64::max);
        let mut svg = Svg::new(WIDTH, TOP + HEIGHT + BOTTOM);
        self.frame(&mut svg, HEIGHT);
        let y = |rate: f64| TOP + HEIGHT - HEIGHT * rate / (highest * 1.05);
        marks(&mut svg, highest, |value| (y(value), rounded(value)));
        for (class, count) in kinds {
            svg.path(class, rate(count).enumerate().map(|(piece, rate)| Some((self.middle(piece), y(rate)))));
        }
        svg.finish("operations per second over time")
    }

    /// Latencies of what succeeded, on a logarithmic axis.
    pub fn latency(&self) -> String {
        let pieces = &self.series.pieces;
        let all = || pieces.iter().flat_map(|piece| [piece.p50_ns, piece.p99_ns]).flatten();
        let lowest = (all().min().unwrap_or(1).max(1_000) as f64).log10().floor();
        let highest = (all().max().unwrap_or(1_000_000).max(1_000) as f64).log10().ceil().max(lowest + 1.0);
        let y = |ns: f64| TOP + HEIGHT * (highest - ns.max(1.0).log10().max(lowest)) / (highest - lowest);
        let mut svg = Svg::new(WIDTH, TOP + HEIGHT + BOTTOM);
        self.frame(&mut svg, HEIGHT);
        for power in lowest as i32..=highest as i32 {
            let ns = 10f64.powi(power);
            svg.line("grid", [LEFT, y(ns), WIDTH - RIGHT, y(ns)]);
            svg.text("small", "end", (LEFT - 6.0, y(ns) + 4.0), duration(ns));
        }
        let line = |ns: fn(&Piece) -> Option<u64>| {
            let point = move |(piece, of): (usize, &Piece)| Some((self.middle(piece), y(ns(of)? as f64)));
            pieces.iter().enumerate().map(point).collect::<Vec<_>>()
        };
        svg.path("p50", line(|piece| piece.p50_ns));
        svg.path("p99", line(|piece| piece.p99_ns));
        svg.finish("latency over time: half and 99 of 100 operations were no slower")
    }

    /// Who led, in which term.
    pub fn leader(&self) -> Option<String> {
        self.samples.first()?;
        let mut svg = Svg::new(WIDTH, TOP + LANE * 1.5 + BOTTOM);
        self.frame(&mut svg, LANE * 1.5);
        svg.text("small", "end", (LEFT - 6.0, TOP + 18.0), "leader");
        let stretches = self.samples.chunk_by(|one, next| (one.leader, one.term) == (next.leader, next.term));
        let mut stretches = stretches.peekable();
        while let Some(stretch) = stretches.next() {
            let (first, last) = (&stretch[0], &stretch[stretch.len() - 1]);
            let until = stretches.peek().map_or(last.time_ns, |next| next[0].time_ns);
            let (from, to) = (self.x(first.time_ns), self.x(until));
            let (class, text) = match first.leader {
                Some(leader) => (colour("peer", leader), format!("{leader} @ {}", first.term)),
                None => ("nobody".to_owned(), "none".to_owned()),
            };
            let title = format!(
                "{}, term {}, from {:.1} s to {:.1} s",
                first.leader.map_or_else(|| "nobody known to lead".into(), |leader| format!("peer {leader} leads")),
                first.term,
                first.time_ns as f64 / 1e9,
                until as f64 / 1e9
            );
            svg.rect(&class, [from, TOP + 2.0, to - from, LANE * 1.5 - 4.0], &title);
            if to - from > 9.0 * text.len() as f64 {
                svg.text("lane", "middle", ((from + to) / 2.0, TOP + 18.0), text);
            }
        }
        Some(svg.finish("leader and term over time"))
    }

    /// How many log entries each peer is behind the one that has applied most.
    pub fn lag(&self) -> Option<String> {
        let ids: BTreeSet<u64> =
            self.samples.iter().flat_map(|sample| sample.peers.iter().map(|peer| peer.id)).collect();
        let lag = |sample: &Sample, id: u64| {
            let most = sample.peers.iter().map(|peer| peer.applied).max()?;
            Some(most - sample.peers.iter().find(|peer| peer.id == id)?.applied)
        };
        let all = self.samples.iter().flat_map(|sample| ids.iter().filter_map(|id| lag(sample, *id)));
        let highest = all.max()?.max(1) as f64;
        let mut svg = Svg::new(WIDTH, TOP + HEIGHT + BOTTOM);
        self.frame(&mut svg, HEIGHT);
        // Far and near alike: a peer that was away is a thousand entries behind, one that is there is two.
        let y = |lag: f64| TOP + HEIGHT - HEIGHT * lag.ln_1p() / (highest.ln_1p() * 1.05);
        for power in 0..=highest.log10() as i32 {
            let value = 10f64.powi(power);
            svg.line("grid", [LEFT, y(value), WIDTH - RIGHT, y(value)]);
            svg.text("small", "end", (LEFT - 6.0, y(value) + 4.0), rounded(value));
        }
        for id in &ids {
            let point = |sample: &Sample| Some((self.x(sample.time_ns), y(lag(sample, *id)? as f64)));
            svg.path(&colour("lag peer", *id), self.samples.iter().map(point));
        }
        Some(svg.finish("entries that each peer has yet to apply, over time"))
    }

    /// The peers that were seen, with the class that colours them.
    pub fn peers(&self) -> Vec<(u64, String)> {
        let ids: BTreeSet<u64> =
            self.samples.iter().flat_map(|sample| sample.peers.iter().map(|peer| peer.id)).collect();
        ids.into_iter().map(|id| (id, colour("peer", id))).collect()
    }
}

fn colour(class: &str, peer: u64) -> String {
    format!("{class}{}", peer.wrapping_sub(1) % PEER_COLOURS + 1)
}

fn described(name: &str, window: Window) -> String {
    format!("{name}: {:.1} s to {:.1} s", window.from_ns as f64 / 1e9, window.to_ns as f64 / 1e9)
}

/// A round step that divides a range into about so many.
fn tick(range: f64, count: f64) -> f64 {
    let raw = (range / count).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= raw).unwrap_or(10.0);
    step * power
}

fn marks(svg: &mut Svg, highest: f64, at: impl Fn(f64) -> (f64, String)) {
    let step = tick(highest, 4.0);
    for n in 0..=8 {
        let value = f64::from(n) * step;
        if value > highest * 1.05 {
            break;
        }
        let (y, text) = at(value);
        svg.line("grid", [LEFT, y, WIDTH - RIGHT, y]);
        svg.text("small", "end", (LEFT - 6.0, y + 4.0), text);
    }
}

fn rounded(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Nanoseconds for people.
pub(super) fn duration(ns: f64) -> String {
    match ns {
        ns if ns < 1e6 => format!("{} us", rounded(ns / 1e3)),
        ns if ns < 1e9 => format!("{} ms", rounded(ns / 1e6)),
        ns => format!("{} s", rounded(ns / 1e9)),
    }
}
