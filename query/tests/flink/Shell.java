import java.util.Scanner;
import java.util.StringJoiner;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.table.api.EnvironmentSettings;
import org.apache.flink.table.api.TableEnvironment;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.types.Row;
import org.apache.flink.util.CloseableIterator;

/**
 * Flink's SQL for a program: a line that comes is a statement, and is answered by one line. `stream ` before it has it run as a
 * stream, without an end; `cancel` ends the last of these. An answer begins with MARK, and with `rows` or `failed`.
 */
public class Shell {
  private static final String MARK = "<answer> ";

  public static void main(String[] args) {
    TableEnvironment batch = TableEnvironment.create(EnvironmentSettings.inBatchMode());
    // What a stream has written is committed with each checkpoint.
    Configuration often = new Configuration();
    often.setString("execution.checkpointing.interval", "1s");
    TableEnvironment stream = TableEnvironment.create(
        EnvironmentSettings.newInstance().inStreamingMode().withConfiguration(often).build());
    TableResult running = null;
    Scanner lines = new Scanner(System.in);
    while (lines.hasNextLine()) {
      String line = lines.nextLine();
      try {
        if (line.equals("cancel")) {
          running.getJobClient().get().cancel().get();
          answer("rows");
        } else if (line.startsWith("stream INSERT")) {
          running = stream.executeSql(line.substring("stream ".length()));
          answer("rows");
        } else if (line.startsWith("stream ")) {
          answer(rows(stream.executeSql(line.substring("stream ".length()))));
        } else if (line.startsWith("INSERT")) {
          // Its result asks a cluster that ends with the job.
          batch.executeSql(line).await();
          answer("rows");
        } else {
          answer(rows(batch.executeSql(line)));
        }
      } catch (Exception error) {
        answer("failed " + causes(error));
      }
    }
    System.exit(0);
  }

  /** All of them, once the statement has ended: fields with tabs between them, rows with two. */
  private static String rows(TableResult result) throws Exception {
    StringJoiner all = new StringJoiner("\t\t", "rows ", "");
    try (CloseableIterator<Row> rows = result.collect()) {
      while (rows.hasNext()) {
        Row row = rows.next();
        StringJoiner fields = new StringJoiner("\t");
        for (int i = 0; i < row.getArity(); i++) {
          fields.add(String.valueOf(row.getField(i)));
        }
        all.add(fields.toString());
      }
    }
    return all.toString();
  }

  private static String causes(Throwable error) {
    StringJoiner all = new StringJoiner(": ");
    for (Throwable cause = error; cause != null; cause = cause.getCause()) {
      all.add(String.valueOf(cause));
    }
    return all.toString();
  }

  private static void answer(String text) {
    System.out.println(MARK + text.replace("\n", " "));
    System.out.flush();
  }
}
