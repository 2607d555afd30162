import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** An HDFS of one name node and one data node: arguments are its folder, and the file that gets its port. */
public class MiniDfs {
  public static void main(String[] arguments) throws Exception {
    Configuration conf = new Configuration();
    conf.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, arguments[0]);
    conf.setBoolean("dfs.permissions.enabled", false);
    conf.setInt("dfs.replication", 1);
    MiniDFSCluster cluster = new MiniDFSCluster.Builder(conf).numDataNodes(1).build();
    cluster.waitActive();
    Path ready = Path.of(arguments[1]);
    Path making = Path.of(arguments[1] + ".tmp");
    Files.writeString(making, Integer.toString(cluster.getNameNodePort()));
    Files.move(making, ready);
    // The cluster ends with the test process that holds our input open.
    while (System.in.read() >= 0) {
    }
    cluster.shutdown();
    System.exit(0);
  }
}
