//! Parts of columns: altered, with defaults, and written as literals.

use lake_query::Kind;

use crate::common::*;
use crate::table::metadata;

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_columns_are_altered() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    // A map is no type that a column can be declared with.
    run(
        &client,
        "CREATE TABLE t AS SELECT CAST(1 AS INT) AS id, named_struct('a', CAST(7 AS INT), 'b', 'old') AS s, \
         [CAST(1 AS INT), CAST(2 AS INT)] AS l, [named_struct('x', CAST(1.5 AS REAL))] AS p, \
         MAP {'k': CAST(5 AS INT)} AS m",
    )
    .await;
    for alter in [
        "ADD COLUMN s.c VARCHAR COMMENT 'new' AFTER a",
        "RENAME COLUMN s.b TO \"B2\"",
        "ALTER COLUMN s.a TYPE BIGINT",
        "ALTER COLUMN l.element TYPE BIGINT",
        "ADD COLUMN p.y INT FIRST",
        "ALTER COLUMN p.element.x TYPE DOUBLE",
        "ALTER COLUMN m.value TYPE BIGINT",
        "ADD COLUMN s.gone INT, DROP COLUMN s.gone",
        "ALTER COLUMN s.\"B2\" FIRST",
        "ALTER s.\"B2\" AFTER c;",
        "ALTER COLUMN p.element.x FIRST",
        "ALTER COLUMN l AFTER m",
        "ALTER COLUMN m FIRST",
        "ALTER COLUMN id FIRST",
    ] {
        run(&client, &format!("ALTER TABLE t {alter}")).await;
    }
    run(
        &client,
        "INSERT INTO t SELECT 2, MAP {'k': 3000000000}, named_struct('a', 3000000000, 'c', 'see', 'B2', 'two'), \
         [named_struct('x', 1e300, 'y', 9)], [3000000000]",
    )
    .await;
    let rows = "SELECT s['a'], s['c'], s['B2'], l[1], p[1]['y'], p[1]['x'], m['k'] FROM t ORDER BY id";
    assert_eq!(
        text(&client, rows).await,
        [
            ["7", "NULL", "old", "1", "NULL", "1.5", "5"],
            ["3000000000", "see", "two", "3000000000", "9", "1e300", "3000000000"]
        ]
    );
    let table = metadata(&cluster, "t").await;
    let names: Vec<_> = table.current_schema().as_struct().fields().iter().map(|field| field.name.as_str()).collect();
    assert_eq!(names, ["id", "m", "s", "p", "l"]);
    let names = table.current_schema().field_by_name("s.c").unwrap();
    assert_eq!(names.doc.as_deref(), Some("new"));
    assert!(table.current_schema().field_by_name("s.gone").is_none());
    for (alter, kind, words) in [
        ("ADD COLUMN s.A INT", Kind::AlreadyExists, "a column s.a already"),
        ("ADD COLUMN id.x INT", Kind::Invalid, "has no fields"),
        ("ADD COLUMN nope.x INT", Kind::NotFound, "no column nope"),
        ("DROP COLUMN s.nope", Kind::NotFound, "no column s.nope"),
        ("DROP COLUMN l.element", Kind::Invalid, "not of a struct"),
        ("ALTER COLUMN m.key TYPE BIGINT", Kind::Invalid, "stay what they are"),
        ("ALTER COLUMN s.c TYPE INT", Kind::Invalid, "cannot become"),
        ("ALTER COLUMN nope FIRST", Kind::NotFound, "no column nope"),
        ("ALTER COLUMN id AFTER nope", Kind::NotFound, "no column nope beside id"),
        ("ALTER COLUMN id AFTER id", Kind::NotFound, "no column id beside id"),
        ("ALTER COLUMN l.element FIRST", Kind::Invalid, "cannot be moved"),
        ("ALTER COLUMN s.c SET NOT NULL", Kind::Invalid, "column s.c cannot become NOT NULL"),
        ("ALTER COLUMN id SET DEFAULT 5", Kind::NotSupported, "format version 3"),
        ("ADD COLUMN d INT DEFAULT 5", Kind::NotSupported, "format version 3"),
    ] {
        let error = refused(&client, &format!("ALTER TABLE t {alter}")).await;
        assert!(error.kind == kind && error.message.contains(words), "{alter}: {:?} {error}", error.kind);
    }
    run(&client, "ALTER TABLE t DROP COLUMN IF EXISTS s.nope").await;
    run(&client, "ALTER TABLE t ADD COLUMN IF NOT EXISTS s.a INT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_columns_have_defaults_in_format_3() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(&client, "CREATE TABLE t WITH ('format-version' = '3') AS SELECT 1 AS id").await;
    run(&client, "ALTER TABLE t ADD COLUMN n INT NOT NULL DEFAULT 2 + 3, ADD COLUMN s VARCHAR DEFAULT 'x'").await;
    run(&client, "ALTER TABLE t ADD COLUMN d DECIMAL(9, 2) DEFAULT 1.5").await;
    run(&client, "INSERT INTO t (id) VALUES (2)").await;
    run(&client, "ALTER TABLE t ALTER COLUMN s SET DEFAULT 'y'").await;
    run(&client, "INSERT INTO t (id, n) VALUES (3, 7)").await;
    run(
        &client,
        "MERGE INTO t USING (SELECT 4 AS k) AS u ON t.id = u.k WHEN NOT MATCHED THEN INSERT (id) VALUES (u.k)",
    )
    .await;
    run(&client, "ALTER TABLE t ALTER COLUMN s DROP DEFAULT").await;
    run(&client, "INSERT INTO t (id) VALUES (5)").await;
    assert_eq!(
        text(&client, "SELECT id, n, s, d FROM t ORDER BY id").await,
        [
            ["1", "5", "x", "1.50"],
            ["2", "5", "x", "1.50"],
            ["3", "7", "y", "1.50"],
            ["4", "5", "y", "1.50"],
            ["5", "5", "NULL", "1.50"]
        ]
    );
    // Numbers are rounded as they are in a cast.
    run(&client, "ALTER TABLE t ADD COLUMN w INT DEFAULT 1.7, ADD COLUMN v BIGINT DEFAULT -2.5e0").await;
    assert_eq!(text(&client, "SELECT DISTINCT w, v FROM t").await, [["2", "-3"]]);
    // Defaults are promoted with their columns.
    run(&client, "ALTER TABLE t ADD COLUMN f REAL DEFAULT 2.5").await;
    for alter in ["n TYPE BIGINT", "f TYPE DOUBLE", "d TYPE DECIMAL(12, 2)"] {
        run(&client, &format!("ALTER TABLE t ALTER COLUMN {alter}")).await;
    }
    run(&client, "INSERT INTO t (id, n) VALUES (6, 3000000000)").await;
    run(&client, "INSERT INTO t (id) VALUES (7)").await;
    assert_eq!(
        text(&client, "SELECT id, n, d, f FROM t WHERE id IN (1, 6, 7) ORDER BY id").await,
        [["1", "5", "1.50", "2.5"], ["6", "3000000000", "1.50", "2.5"], ["7", "5", "1.50", "2.5"]]
    );
    for (alter, kind, words) in [
        ("ALTER COLUMN n SET DEFAULT 'five'", Kind::Invalid, "the default of column n"),
        ("ADD COLUMN l INT[] DEFAULT [1]", Kind::NotSupported, "a default for column l"),
        ("ADD COLUMN m INT NOT NULL", Kind::NotSupported, "NOT NULL"),
    ] {
        let error = refused(&client, &format!("ALTER TABLE t {alter}")).await;
        assert!(error.kind == kind && error.message.contains(words), "{alter}: {:?} {error}", error.kind);
    }
    // From the beginning.
    let columns = "(id BIGINT, n INT NOT NULL DEFAULT 2 + 3, s VARCHAR DEFAULT 'x')";
    run(&client, &format!("CREATE TABLE made {columns} WITH ('format-version' = '3')")).await;
    run(&client, "INSERT INTO made (id) VALUES (1)").await;
    run(&client, "INSERT INTO made VALUES (2, 7, NULL)").await;
    assert_eq!(text(&client, "SELECT * FROM made ORDER BY id").await, [["1", "5", "x"], ["2", "7", "NULL"]]);
    for (create, kind, words) in [
        (format!("CREATE TABLE made_too {columns}"), Kind::NotSupported, "format version 3"),
        (
            format!("CREATE OR REPLACE TABLE made {columns}"),
            Kind::NotSupported,
            "SET DEFAULT and COMMENT ON COLUMN set them afterwards",
        ),
        ("CREATE TABLE made_too (id BIGINT DEFAULT nope)".to_owned(), Kind::NotFound, "nope"),
    ] {
        let error = refused(&client, &create).await;
        assert!(error.kind == kind && error.message.contains(words), "{create}: {:?} {error}", error.kind);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn literals_of_nested_types_are_inserted() {
    let cluster = Cluster::start(1).await;
    let client = cluster.client(0).await;
    run(
        &client,
        "CREATE TABLE t AS SELECT CAST(0 AS INT) AS id, [CAST(1 AS INT)] AS l, \
         named_struct('a', CAST(1 AS INT), 'b', 'x') AS s, MAP {'k': 1} AS m, [named_struct('x', 1e0)] AS p",
    )
    .await;
    run(&client, "TRUNCATE TABLE t").await;
    run(
        &client,
        "INSERT INTO t VALUES (1, [1, 2], {a: 7, b: 'x'}, MAP {'k': 5}, [named_struct('x', 1.5)]), (2, NULL, NULL, NULL, NULL), \
         (3, [], named_struct('a', NULL, 'b', 'y'), MAP {'k': 6, 'j': 7}, [])",
    )
    .await;
    assert_eq!(
        text(&client, "SELECT id, l[2], array_length(l), s['a'], s['b'], m['k'], p[1]['x'] FROM t ORDER BY id").await,
        [
            ["1", "2", "2", "7", "x", "5", "1.5"],
            ["2", "NULL", "NULL", "NULL", "NULL", "NULL", "NULL"],
            ["3", "NULL", "0", "NULL", "y", "6", "NULL"]
        ]
    );
    run(&client, "INSERT INTO t (l, id) VALUES ([4, NULL], 4)").await;
    assert_eq!(text(&client, "SELECT l FROM t WHERE id = 4").await, [["[4, NULL]"]]);
    run(&client, "UPDATE t SET l = [9], s = {a: 1, b: 'z'} WHERE id = 2").await;
    assert_eq!(text(&client, "SELECT l, s['b'] FROM t WHERE id = 2").await, [["[9]", "z"]]);
}
