#include "graph/text.h"

#include <random>

#include "graph/pass.h"
#include "tests/testing.h"

namespace onnxddp {
namespace {

constexpr const char* kMlp = R"(graph mlp v1
input  x: f32[N,4]
param  w: f32[3,4]
state  b: f32[3]
const  half: f32[] = [0.5]
const  count: f32[] = [3*N]
  h: f32[N,3] = Gemm(x, w, b) {transB=1}
  "odd name": f32[N,3] = Mul(h, half)
  total: f32[] = ReduceSum("odd name") {axes=[0,1], keepdims=0}
  mean: f32[] = Div(total, count)
update b <- b
output mean
output result = "odd name"
)";

TEST(Text, DumpIsWhatWasParsed) { EXPECT_EQ(dump(parse(kMlp)), kMlp); }

TEST(Text, SkipsComments) {
  EXPECT_EQ(dump(parse(std::string("# a note\n") + "graph g v1  # here\ninput x: f32[2]\noutput x\n")),
            "graph g v1\ninput  x: f32[2]\noutput x\n");
}

TEST(Text, LargeConstantsAreBlobs) {
  Graph graph("g");
  graph.outputs.push_back({"c", graph.add_constant("c", HostTensor::full(DType::f32, {5, 5}, 0.25))});
  Blobs blobs;
  const std::string text = dump(graph, &blobs);
  EXPECT_EQ(dump(parse(text, blobs)), text);
  EXPECT_THROW(parse(text), Error);
}

TEST(Text, NamesTheLineOfAMistake) {
  const auto message = [](const std::string& text) {
    try {
      parse(text);
    } catch (const Error& error) {
      return std::string(error.what()) + " | " + error.place();
    }
    return std::string("accepted");
  };
  EXPECT_NE(message("graph g v2\n").find("line 1"), std::string::npos);
  EXPECT_NE(message("graph g v1\ninput x: f32[2]\n  y: f32[2] = Rellu(x)\n").find("did you mean 'Relu'"),
            std::string::npos);
  EXPECT_NE(message("graph g v1\ninput x: f32[2]\n  y: f32[3] = Relu(x)\n").find("'y' is f32[2], not f32[3]"),
            std::string::npos);
  EXPECT_NE(message("graph g v1\ninput x: f32[2]\ninput x: f32[2]\n").find("defined twice"),
            std::string::npos);
  EXPECT_NE(message("graph g v1\noutput z\n").find("'z' is not defined"), std::string::npos);
  EXPECT_NE(message("").find("no 'graph NAME v1' line"), std::string::npos);
}

/// A random graph of elementwise, matrix and layout ops with odd names.
Graph random_graph(unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](std::size_t n) { return random() % n; };
  Graph graph("random graph " + std::to_string(seed));
  Builder builder(graph);
  const Dim n = Dim::symbol("N");
  std::vector<Expr> values;
  values.push_back(builder.expr(graph.add_input("x", {DType::f32, {n, 4}})));
  values.push_back(builder.expr(graph.add_param("w \"quoted\"", {DType::f32, {4}})));
  values.push_back(builder.expr(graph.add_param("w.grad", {DType::f32, {n, 4}}, Kind::state)));
  builder.set_hint(pick(2) == 0 ? "t" : "new\nline");
  for (int i = 0; i < 12; ++i) {
    const Expr a = values[pick(values.size())], b = values[pick(values.size())];
    switch (pick(6)) {
      case 0: values.push_back(a.shape() == b.shape() ? a + b : call("Relu", {a})); break;
      case 1: values.push_back(a * (static_cast<double>(pick(100)) / 7)); break;
      case 2: values.push_back(call("Clip", {a}, {{"min", -1e-3}, {"max", 1e20}})); break;
      case 3: values.push_back(reshape(a, {numel(a.shape())})); break;
      case 4: values.push_back(a.rank() == 2 ? transpose(a, {1, 0}) : a); break;
      default: values.push_back(reduce_sum(a, {0}, true)); break;
    }
  }
  for (std::size_t i = 3; i < values.size(); ++i)
    if (pick(3) == 0) graph.outputs.push_back({"out " + std::to_string(i), values[i].id()});
  return graph;
}

TEST(Text, ParseOfDumpIsTheIdentityOnRandomGraphs) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const Graph graph = random_graph(seed);
    verify(graph);
    Blobs blobs;
    const std::string text = dump(graph, &blobs);
    ASSERT_EQ(dump(parse(text, blobs)), text) << "seed " << seed;
  }
}

TEST(Sample, MakesInputsConstantsAndRanges) {
  const Sample sample = parse_sample("Gather(f32[5,3] in (0.5, 2), i64[2]=[0,4]) {axis=1}", DType::f64);
  EXPECT_EQ(dump(sample.graph), testing::unindent(R"(
    graph Gather v1
    input  x0: f64[5,3]
    const  x1: i64[2] = [0, 4]
      y0: f64[5,2] = Gather(x0, x1) {axis=1}
    output y0
  )"));
  EXPECT_EQ(sample.ranges.at("x0"), (std::pair<double, double>(0.5, 2)));
}

TEST(BindDims, ReplacesSymbolsEverywhere) {
  Graph graph = parse(kMlp);
  bind_dims(graph, {{"N", 2}});
  const std::string text = dump(graph);
  EXPECT_EQ(text.find('N'), std::string::npos) << text;
  EXPECT_NE(text.find("const  count: f32[] = [6]"), std::string::npos) << text;
}

TEST(Verify, FindsABrokenGraph) {
  Graph graph = parse(kMlp);
  graph.value(graph.find("h")).type.shape[1] = 7;
  EXPECT_THROW(verify(graph), InternalError);
  graph = parse(kMlp);
  std::swap(graph.order[0], graph.order[1]);
  EXPECT_THROW(verify(graph), InternalError);
}

}  // namespace
}  // namespace onnxddp
