// The two writers, the model without payloads, and tensor files.
#include "graph/builder.h"
#include "tests/importer/onnx_testing.h"

namespace onnxddp::testing {
namespace {

const pb::NodeProto& node_of(const pb::ModelProto& model, const std::string& op) {
  for (const pb::NodeProto& node : model.graph().node())
    if (node.op_type() == op) return node;
  throw Error("no node " + op);
}

std::map<std::string, HostTensor> changed(const ImportedModel& model) {
  std::map<std::string, HostTensor> values = model.values;
  for (auto& [name, value] : values)
    if (is_float(value.dtype()))
      for (std::int64_t i = 0; i < value.numel(); ++i) value.set_double(i, value.as_double(i) + 1);
  return values;
}

TEST(SaveTrained, PutsValuesWhereTheyWere) {
  const ImportedModel model = import_text(
      model_text(13, R"(g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}, int64[1] ax = {0}> {
    b = Constant<value = float[2] {5.0, 6.0}>()
    c = Constant<value_floats = [7.0, 8.0]>()
    h = MatMul(x, w)
    i = Add(h, b)
    y = Mul(i, c)
  })"));
  const std::string bytes = save_trained(*model.source, changed(model));
  full_check(bytes);
  const ImportedModel again = import_onnx(load_onnx_bytes(bytes, "again"), {});
  EXPECT_EQ(again.values, changed(model));
  const pb::ModelProto saved = parse_bytes(bytes);
  EXPECT_EQ(saved.graph().node(1).attribute(0).floats(1), 9.0F);
  EXPECT_EQ(dump(again.graph), dump(model.graph));
  EXPECT_EQ(bytes, save_trained(*model.source, changed(model)));
}

TEST(SaveTrained, WithTheSameValuesTheFileMeansTheSame) {
  const ImportedModel model = import_text(
      model_text(13, "g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }"));
  const ImportedModel again =
      import_onnx(load_onnx_bytes(save_trained(*model.source, model.values), "again"), {});
  EXPECT_EQ(again.values, model.values);
}

TEST(SaveTrained, ConstantsOfFunctionsKeepTheirPlace) {
  const ImportedModel model = import_text(R"(<ir_version: 10, opset_import: ["" : 17, "l" : 1]>
g (float[N,2] x) => (float[N,2] y) { a = l.F(x) y = l.F(a) }
<domain: "l", opset_import: ["" : 17]>
F (x) => (y) { w = Constant<value = float[2,2] {1.0, 2.0, 3.0, 4.0}>() y = MatMul(x, w) })");
  ASSERT_TRUE(model.values.count("F/w"));
  const std::string bytes = save_trained(*model.source, changed(model));
  full_check(bytes);
  const pb::ModelProto saved = parse_bytes(bytes);
  ASSERT_EQ(saved.functions_size(), 1);
  EXPECT_EQ(saved.graph().node_size(), 2);
  EXPECT_EQ(import_onnx(load_onnx_bytes(bytes, "again"), {}).values.at("F/w"),
            HostTensor::of<float>({2, 2}, {2, 3, 4, 5}));
}

TEST(SaveTrained, KeepsTheFilesElementType) {
  const ImportedModel model = import_text(
      model_text(13, "g (double[N,2] x) => (double[N,2] y) <double[2] w = {1,2}> { y = Mul(x, w) }"));
  EXPECT_EQ(parse_bytes(save_trained(*model.source, {{"w", HostTensor::of<float>({2}, {3, 4})}}))
                .graph()
                .initializer(0)
                .data_type(),
            pb::TensorProto::DOUBLE);
  EXPECT_THROW(save_trained(*model.source, {{"w", HostTensor::of<float>({3}, {3, 4, 5})}}), InternalError);
}

constexpr const char* kBatchNorm =
    R"(g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, float[2] v = {1,1}, float r = {0.25}, float[N,2] h, float[2] m2, float[2] v2> {
  h, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, m, v)
  t = Constant<value = bool {1}>()
  y = Dropout(h, r, t)
})";

TEST(SaveTrained, BatchNormAndDropoutAreInInferenceForm) {
  const ImportedModel model = import_text(model_text(15, kBatchNorm));
  const std::string bytes = save_trained(*model.source, model.values);
  full_check(bytes);
  const pb::ModelProto saved = parse_bytes(bytes);
  const pb::NodeProto& norm = node_of(saved, "BatchNormalization");
  EXPECT_EQ(norm.output_size(), 1);
  EXPECT_EQ(norm.attribute(0).i(), 0);
  const pb::NodeProto& dropout = node_of(saved, "Dropout");
  EXPECT_EQ(dropout.input_size(), 2);
  EXPECT_EQ(dropout.input(1), "r");
  EXPECT_EQ(saved.graph().node_size(), 2) << "the Constant that only said training_mode is gone";
  for (const pb::ValueInfoProto& info : saved.graph().value_info()) {
    EXPECT_NE(info.name(), "m2");
    EXPECT_NE(info.name(), "v2");
  }
  EXPECT_EQ(nodes_of(import_onnx(load_onnx_bytes(bytes, "again"), {}).graph), nodes_of(model.graph))
      << "it trains again";
}

TEST(SaveTrained, OldTrainingFormsBecomeInference) {
  const ImportedModel model = import_text(model_text(
      9,
      R"(g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, float[2] v = {1,1}> {
    y, a, c, d, e = BatchNormalization(x, s, b, m, v)
  })"));
  const std::string bytes = save_trained(*model.source, model.values);
  full_check(bytes);
  EXPECT_EQ(node_of(parse_bytes(bytes), "BatchNormalization").output_size(), 1);
}

TEST(SaveTrained, StatisticsThatAreReadComeFromTheBuffers) {
  const ImportedModel model = import_text(model_text(
      15,
      R"(g (float[N,2] x) => (float[N,2] y, float[2] m2) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, float[2] v = {1,1}> {
    y, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, m, v)
  })"));
  const std::string bytes = save_trained(*model.source, model.values);
  full_check(bytes);
  const pb::ModelProto saved = parse_bytes(bytes);
  EXPECT_EQ(node_of(saved, "Identity").input(0), "m");
  EXPECT_EQ(node_of(saved, "Identity").output(0), "m2");
}

TEST(SaveTrained, BatchNormInsideAFunction) {
  const ImportedModel model = import_text(R"(<ir_version: 10, opset_import: ["" : 17, "l" : 1]>
g (float[N,2] x) => (float[N,2] y) <float[2] s = {1,1}, float[2] b = {0,0}, float[2] m = {0,0}, float[2] v = {1,1}> { y = l.Norm<train = 1>(x, s, b, m, v) }
<domain: "l", opset_import: ["" : 17]>
Norm <train> (x, s, b, m, v) => (y) { y, mm, vv = BatchNormalization<training_mode: int = @train>(x, s, b, m, v) })");
  EXPECT_EQ(model.graph.updates.size(), 2U);
  const std::string bytes = save_trained(*model.source, model.values);
  full_check(bytes);
  const pb::NodeProto norm = parse_bytes(bytes).functions(0).node(0);
  EXPECT_EQ(norm.output_size(), 1);
  EXPECT_EQ(norm.attribute(0).ref_attr_name(), "");
}

TEST(SaveTrained, LargeModelsGetAFileOfExternalData) {
  TemporaryFolder folder;
  std::string numbers = "1";
  for (int i = 1; i < 400; ++i) numbers += cat(",", i);
  const ImportedModel model = import_text(
      model_text(13, "g (float[N,20] x) => (float[N,20] y) <float[20,20] w = {" + numbers +
                         "}, float[20,20] v = {" + numbers + "}> { h = MatMul(x, w) y = MatMul(h, v) }"));
  EXPECT_EQ(save_trained(*model.source, model.values, "m.data").data, "");
  const SavedModel saved = save_trained(*model.source, changed(model), "m.data", 1000);
  EXPECT_LT(saved.model.size(), 1000U);
  EXPECT_EQ(saved.data.size(), 4096U + 1600U);
  write(folder / "m.onnx", saved.model);
  write(folder / "m.data", saved.data);
  EXPECT_NO_THROW(pb::checker::check_model((folder / "m.onnx").string(), true));
  EXPECT_EQ(import_onnx(load_onnx(folder / "m.onnx"), {}).values, changed(model));
}

TEST(SourceWithoutPayloads, ComesBackWithItsValues) {
  const ImportedModel model = import_text(model_text(
      15, R"(g (float[N,10] x) => (float[N,10] y) <float[10,10] w = {)" + [] {
        std::string numbers = "1";
        for (int i = 1; i < 100; ++i) numbers += cat(",", i);
        return numbers;
      }() + R"(}, float[10] b = {0,1,2,3,4,5,6,7,8,9}, int64[2] s = {0,-1}> {
    h = MatMul(x, w)
    i = Add(h, b)
    y = Reshape(i, s)
  })"));
  const std::string stripped = source_without_payloads(*model.source);
  EXPECT_LT(stripped.size() + 300, save_trained(*model.source, model.values).size());
  const auto source = load_onnx_bytes(stripped, "source.onnx");
  const ImportedModel again = import_onnx(source, {});
  EXPECT_EQ(dump(again.graph), dump(model.graph));
  EXPECT_EQ(again.roles.size(), model.roles.size());
  const std::string bytes = save_trained(*source, model.values);
  full_check(bytes);
  EXPECT_EQ(bytes, save_trained(*model.source, model.values));
  EXPECT_HAS(report_of([&] { save_trained(*source, {}); }), "no value for tensor 'w'");
  EXPECT_EQ(source_without_payloads(*source), stripped);
}

TEST(TensorFile, RoundTrips) {
  const std::map<std::string, HostTensor> tensors = {{"a", HostTensor::of<float>({2}, {1.5F, -2})},
                                                     {"b", HostTensor::of<std::int64_t>({}, {7})},
                                                     {"c", HostTensor::of<double>({0, 3}, {})}};
  const std::string bytes = tensors_to_onnx(tensors, {{"step", "12"}});
  full_check(bytes);
  const TensorFile file = tensors_from_onnx(bytes, "state.onnx");
  EXPECT_EQ(file.tensors, tensors);
  EXPECT_EQ(file.metadata.at("step"), "12");
  EXPECT_EQ(bytes, tensors_to_onnx(tensors, {{"step", "12"}}));
  EXPECT_HAS(report_of([&] { tensors_from_onnx(bytes.substr(0, 20), "state.onnx"); }),
             "state.onnx is damaged");
}

// ---- the IR as ONNX

std::string round_trip(const std::string& text) {
  const Graph graph = parse(text);
  std::map<std::string, HostTensor> values;
  for (ValueId id : graph.params)
    values.emplace(graph.value(id).name,
                   HostTensor(graph.value(id).type.dtype, static_shape(graph.value(id).type.shape)));
  const std::string bytes = graph_to_onnx(graph, values);
  EXPECT_NO_THROW(pb::checker::check_model(parse_bytes(bytes)));
  ImportOptions options;
  options.training = false;
  return nodes_of(import_onnx(load_onnx_bytes(bytes, "ir"), options).graph);
}

TEST(GraphToOnnx, StandardOperatorsComeBack) {
  const std::string text = R"(graph g v1
input  x: f32[N,2,4,4]
param  w: f32[3,2,3,3]
param  k: f32[48,5]
  c: f32[N,3,4,4] = Conv(x, w) {pads=[1,1,1,1]}
  r: f32[N,3,4,4] = Clip(c) {max=6, min=0}
  f: f32[N,48] = Reshape(r) {shape=[N,48]}
  m: f32[N,5] = Gemm(f, k)
  s: f32[N,5] = Softmax(m) {axis=1}
  t: f32[N,1] = ReduceMean(s) {axes=[1]}
  u: f32[N,2] = Slice(s) {axes=[1], ends=[-1], starts=[4], steps=[-3]}
  d: f64[N,2] = Cast(u) {to="f64"}
  a: i64[N] = ArgMax(s) {axis=1}
output t
output d
output a
)";
  EXPECT_EQ(round_trip(text), nodes_of(parse(text)));
}

TEST(GraphToOnnx, OthersAreInADomainOfTheirOwn) {
  const std::string text = R"(graph g v1
input  x: f32[N,3]
input  t: f32[N,1]
  s: f32[1,3] = SumTo(x) {shape=[1,3]}
  e: f32[N,3] = Expand(t) {shape=[N,3]}
  y: f32[N,3] = Mul(e, s)
output y
)";
  EXPECT_EQ(round_trip(text), nodes_of(parse(text)));
}

TEST(GraphToOnnx, UpdatesAndUnsetParamsAreShown) {
  const Graph graph = parse(R"(graph g v1
input  x: f32[2]
param  p: f32[2]
  y: f32[2] = Add(x, p)
update p <- y
output loss = y
)");
  const pb::ModelProto model = parse_bytes(graph_to_onnx(graph, {}));
  EXPECT_EQ(model.graph().input_size(), 2);
  EXPECT_EQ(model.metadata_props(0).key(), "onnx_ddp.update.p");
  EXPECT_EQ(model.metadata_props(0).value(), "y");
  EXPECT_EQ(model.graph().output(0).name(), "loss");
}

}  // namespace
}  // namespace onnxddp::testing
