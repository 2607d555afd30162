# Databricks notebook source
# MAGIC %md
# MAGIC # deeprec-spark: quick start
# MAGIC From raw click logs in a DataFrame to a model that answers, in a few cells. It runs as it is on Databricks, in Jupyter
# MAGIC and as a plain script (`python quickstart.py`); `pip install deeprec-spark` is all it needs.
# MAGIC
# MAGIC The rows are generated: 13 counts and 26 categories like Criteo's, with a planted truth, so the best AUC that any model
# MAGIC can reach is known.

# COMMAND ----------

import logging
import os
import tempfile

logging.basicConfig(format="%(message)s")
logging.getLogger("deeprec_spark").setLevel(logging.INFO)  # progress of training, logs of the executors

# Where data, checkpoints and the model go. On a cluster: a folder that all executors reach, such as /dbfs/... or s3a://...
work = os.environ.get("QUICKSTART_DIR") or tempfile.mkdtemp(prefix="quickstart-")
rows = int(os.environ.get("QUICKSTART_ROWS", "20000"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Session
# MAGIC `init_session` takes the session that is there (a notebook's, or that of spark-submit) or makes one.

# COMMAND ----------

from deeprec_spark.session import init_session

spark = init_session({"spark.app.name": "quickstart"})
spark.version

# COMMAND ----------

# MAGIC %md
# MAGIC ## Data
# MAGIC Any DataFrame will do. Categories are text, as they come; they are hashed to 64 bits by a function that the deployed
# MAGIC model repeats, so there is no vocabulary to build or to keep.

# COMMAND ----------

from deeprec_spark.features.synthetic import generate_criteo

clicks = generate_criteo(spark, rows, seed=1)
clicks.select("label", "I1", "I2", "C1", "C2").show(3)

# COMMAND ----------

from deeprec_spark.features.criteo import prepare_criteo

spec = prepare_criteo(spark, clicks, f"{work}/prepared")
train, test = (spark.read.parquet(f"{work}/prepared/{part}") for part in ("train", "test"))
print(train.count(), "training rows,", test.count(), "test rows,", len(spec.features), "features")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Model
# MAGIC A Keras 3 model. Each `SparseEmbedding` is a table that grows with the ids it meets; it lives outside the TensorFlow
# MAGIC graph, in this process or on parameter servers.

# COMMAND ----------


def model_creator(config):
    import keras

    from deeprec_spark.layers import SparseEmbedding

    dense = [keras.Input((1,), name=name) for name in config["dense"]]
    ids = [keras.Input((), dtype="int64", name=name) for name in config["categories"]]
    vectors = [SparseEmbedding(config["dim"], name=f"emb_{tensor.name}")(tensor) for tensor in ids]
    x = keras.layers.Concatenate()([*dense, *vectors])
    for units in config["hidden"]:
        x = keras.layers.Dense(units, activation="relu")(x)
    click = keras.layers.Dense(1, activation="sigmoid", name="click")(x)
    model = keras.Model([*dense, *ids], click)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model


# COMMAND ----------

# MAGIC %md
# MAGIC ## Training
# MAGIC `num_ps=0` keeps the tables inside the one worker. On a cluster say `num_ps=1, num_workers=2` (or more): parameter
# MAGIC servers and workers then run on the executors, one task slot each.

# COMMAND ----------

from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.estimator import Estimator

estimator = Estimator.from_keras(
    model_creator=model_creator,
    config={
        "dense": [f"I{i}" for i in range(1, 14)],
        "categories": [f"C{i}" for i in range(1, 27)],
        "dim": 8,
        "hidden": [32],
    },
    num_ps=0,
    sparse_optimizer=Adagrad(learning_rate=0.05),
    model_dir=f"{work}/model_dir",
    feature_spec=spec,
    spark=spark,
)
history = estimator.fit(
    f"{work}/prepared/train", epochs=2, batch_size=512, validation_data=f"{work}/prepared/test"
)
history

# COMMAND ----------

# MAGIC %md
# MAGIC ## Evaluation and prediction
# MAGIC `predict` gives a lazy DataFrame: all its columns, and the prediction.

# COMMAND ----------

metrics = estimator.evaluate(f"{work}/prepared/test", batch_size=2048)
print(metrics)

# COMMAND ----------

predictions = estimator.predict(test, batch_size=2048)
predictions.select("label", "prediction").show(3)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A model to deploy
# MAGIC A SavedModel of stock TensorFlow operations, embeddings inside. It takes raw values: text is hashed in the graph.

# COMMAND ----------

estimator.export(f"{work}/model")

from deeprec_spark.query import query

row = {**{f"I{i}": 1.0 for i in range(1, 14)}, **{f"C{i}": "05db9164" for i in range(1, 27)}}
answer = query(f"{work}/model", [row])
print(answer)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The same hashing in SQL

# COMMAND ----------

from deeprec_spark.udfs import register_udfs

print(register_udfs(spark))

# COMMAND ----------

estimator.shutdown()
