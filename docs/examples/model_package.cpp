// Opens a model package of hatch-epcontext with ONNX Runtime 1.31 or newer.
// Tested on Linux, on the CPU and on QNN's simulator, with a small header that declares
// the classes as ONNX Runtime's documentation does.
// Not verified on Windows or on hardware.
#include <array>
#include <cstdint>
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>

#include <onnxruntime_cxx_api.h>

using Options = std::unordered_map<std::string, std::string>;

// A session of the variant that ONNX Runtime selects for the EP.
// `start` holds the options without which the EP does not start.
Ort::Session Open(Ort::Env& env, const Ort::ModelPackageContext& package, const char* model,
                  const std::string& ep, const Options& start) {
  std::vector<Ort::ConstEpDevice> devices;
  for (auto device : env.GetEpDevices()) {
    if (device.EpName() == ep) devices.push_back(device);
  }
  Ort::SessionOptions options;
  options.AppendExecutionProvider_V2(env, devices, start);
  const Ort::ModelPackageOptions choice(env, options);
  return package.SelectComponent(model, choice).CreateSession(env);
}

Ort::Session OpenBest(Ort::Env& env, const Ort::ModelPackageContext& package, const char* model) {
  try {
    return Open(env, package, model, "QNNExecutionProvider", {{"backend_type", "htp"}});
  } catch (const Ort::Exception& error) {
    std::cerr << "not on the NPU: " << error.what() << '\n';
  }
  return Open(env, package, model, "CPUExecutionProvider", {});
}

int main() {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "digits");
  env.RegisterExecutionProviderLibrary("QNNExecutionProvider",
                                       ORT_TSTR("onnxruntime_providers_qnn.dll"));
  const Ort::ModelPackageContext package(ORT_TSTR("digits_app/epcontext"));
  Ort::Session session = OpenBest(env, package, "digits");

  std::array<float, 64> image{};
  const std::array<std::int64_t, 4> shape{1, 1, 8, 8};
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const auto input = Ort::Value::CreateTensor<float>(memory, image.data(), image.size(),
                                                     shape.data(), shape.size());
  const char* const inputs[] = {"image"};
  const char* const outputs[] = {"logits"};
  const auto results = session.Run(Ort::RunOptions{nullptr}, inputs, &input, 1, outputs, 1);
  std::cout << results[0].GetTensorData<float>()[0] << '\n';
}
