//! The book holds together: every page is in its table of contents, and every link leads somewhere.

use std::path::{Path, PathBuf};

use crate::common::files;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn markdown_files(dir: &Path) -> Vec<PathBuf> {
    files(dir).into_iter().filter(|path| path.extension().is_some_and(|e| e == "md")).collect()
}

/// The targets of `[text](target)` in a page, without those on the web.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets.filter(|t| !t.contains("://")).collect()
}

#[test]
fn every_page_is_listed_and_every_link_leads_somewhere() {
    let pages = root().join("docs/src");
    let summary = std::fs::read_to_string(pages.join("SUMMARY.md")).unwrap();
    let mut files = markdown_files(&pages);
    assert!(files.len() > 3, "the book has pages");
    for page in &files {
        let name = page.strip_prefix(&pages).unwrap().to_str().unwrap();
        assert!(name == "SUMMARY.md" || links(&summary).contains(&name), "{name} is not in SUMMARY.md");
    }
    files.extend([root().join("README.md"), root().join("CHANGELOG.md")]);
    for page in files {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let file = link.split('#').next().unwrap_or_default();
            let target = page.parent().unwrap().join(file);
            assert!(file.is_empty() || target.exists(), "{}: the link to {link} leads nowhere", page.display());
        }
    }
}

#[test]
fn source_files_that_the_book_names_exist() {
    let words = |text: &str| -> Vec<String> {
        let code = text.split('`').skip(1).step_by(2);
        code.filter(|c| c.ends_with(".rs") && c.contains('/')).map(str::to_owned).collect()
    };
    let mut named = 0;
    for page in markdown_files(&root().join("docs/src")) {
        for file in words(&std::fs::read_to_string(&page).unwrap()) {
            named += 1;
            assert!(root().join(&file).exists(), "{} names {file}, which does not exist", page.display());
        }
    }
    assert!(named > 5, "the book names source files");
}

fn help(command: &[&str], option: &str) -> String {
    let help = std::process::Command::new(crate::common::LAKE).args(command).arg(option).output().unwrap();
    String::from_utf8(help.stdout).unwrap()
}

fn page(name: &str) -> String {
    std::fs::read_to_string(root().join("docs/src").join(name)).unwrap()
}

#[test]
fn the_book_lists_every_option() {
    let page = page("configuration.md");
    for command in ["up", "standalone", "metasrv", "query"] {
        let help = help(&[command], "--help");
        let options: Vec<_> = help.split_whitespace().filter(|w| w.starts_with("--") && w.len() > 2).collect();
        assert!(options.len() > 5, "{help}");
        for option in options.iter().map(|o| o.trim_end_matches([',', ']', '.'])) {
            assert!(page.contains(option), "docs/src/configuration.md does not mention {option} of lake {command}");
        }
    }
}

/// The TOML blocks of a page, by the path in their first line.
fn toml_blocks(page: &str) -> Vec<(&str, &str)> {
    let blocks = page.split("```toml\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(block, _)| block);
    blocks.map(|block| (block.lines().next().unwrap_or_default().trim_start_matches("# "), block)).collect()
}

#[test]
fn a_cluster_on_three_machines_starts_with_the_files_that_the_book_has() {
    let dir = tempfile::tempdir().unwrap();
    // What the page has in /etc/lake; everything else is taken as it stands there.
    let (file, secret) = (dir.path().join("config.toml"), dir.path().join("secret"));
    std::fs::write(&secret, "0123456789abcdef\n").unwrap();
    let page = page("three-machines.md");
    let blocks = toml_blocks(&page);
    for (path, block) in &blocks {
        std::fs::write(&file, block).unwrap();
        let reaches_others = match *path {
            "/etc/lake/metasrv.toml" => {
                let options = lake_metasrv::config::Options {
                    config: Some(file.clone()),
                    secret_file: Some(secret.clone()),
                    ..Default::default()
                };
                let config = lake_metasrv::config::Config::load(options).unwrap_or_else(|e| panic!("{path}: {e}"));
                [Some(config.listen), Some(config.raft_listen), config.http_listen]
            }
            "/etc/lake/query.toml" => {
                let keys = block.contains("s3_access_key_file").then(|| secret.clone());
                let options = lake_query::Options {
                    config: Some(file.clone()),
                    secret_file: Some(secret.clone()),
                    s3_access_key_file: keys.clone(),
                    s3_secret_key_file: keys,
                    ..Default::default()
                };
                let config = lake_query::Config::new(options).unwrap_or_else(|e| panic!("{path}: {e}"));
                assert_eq!(config.meta.len(), 3, "{block}");
                [Some(config.listen), config.rest_listen, config.http_listen]
            }
            other => panic!("what is {other} of docs/src/three-machines.md?"),
        };
        for address in reaches_others {
            let address = address.unwrap_or_else(|| panic!("{path} says all three addresses"));
            assert!(!address.ip().is_loopback(), "{address}");
            assert!(page.contains(&format!("| {} |", address.port())), "no word of port {}", address.port());
        }
        assert!(block.contains("secret_file = \"/etc/lake/secret\""), "{block}");
    }
    assert_eq!(blocks.len(), 3, "one for a peer, two for query nodes");
}

/// The first words of the lines of a section of a help text.
fn section<'a>(help: &'a str, heading: &str) -> Vec<&'a str> {
    let lines = help.lines().skip_while(|line| *line != heading).skip(1).take_while(|line| !line.is_empty());
    // Further lines of a description are indented more.
    let own = lines.filter(|line| line.starts_with("  ") && !line.starts_with("          "));
    own.filter_map(|line| line.split_whitespace().find(|word| !word.ends_with(','))).collect()
}

#[test]
fn the_book_names_every_command_of_the_operator_and_its_options() {
    let pages = [page("meta.md"), page("membership.md"), page("rescue.md")];
    let mut open = vec![vec!["meta".to_owned()]];
    let mut commands = 0;
    while let Some(path) = open.pop() {
        let path_words: Vec<&str> = path.iter().map(String::as_str).collect();
        let help = help(&path_words, "-h");
        for command in section(&help, "Commands:").into_iter().filter(|name| *name != "help") {
            assert!(pages[0].contains(command), "docs/src/meta.md does not mention {} {command}", path.join(" "));
            open.push([path.clone(), vec![command.to_owned()]].concat());
            commands += 1;
        }
        for option in section(&help, "Options:").into_iter().filter(|name| *name != "--help") {
            let told = pages.iter().any(|page| page.contains(option));
            assert!(told, "no page of the operator mentions {option} of lake {}", path.join(" "));
        }
    }
    assert!(commands > 20, "{commands} commands");
}
